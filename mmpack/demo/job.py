"""One GRPO step on Geometry3K, or on short clips: from real media to an optimizer step, every stage checked.

`mmpack smoke` runs it. The tutorial in examples/ takes the same step without the checks.

    rollout   an engine samples responses and says what it saw          -> rollout.jsonl
    train     the trainer's side of the same samples, from the same ids -> train.jsonl
    parity    both sides are compared before any number is
    logprobs  of the sampled tokens only: packed, with shared prompts, padded; each against the engine's
    kept ids  two problems once more, sampled with top-p and top-k: ratios over what these left, and over all ids
    loss      advantages over the whole batch, GRPO by micro-batches, AdamW
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.contracts import TOLERANCES, loss_bound
from mmpack.demo.logprob_checks import LogprobChecks

LAYOUTS = ("packed", "shared_prefix", "padded_left", "padded_right")


class Job(LogprobChecks):
    """`with Job(options, report) as job: job.run()`. Every check goes to the report with its figure."""

    def run(self) -> None:
        """The whole step. Layouts that differ end it, and so do numbers: no step is taken on either."""
        self.sample_responses()
        self.build_train_side()
        self.check_parity()
        if not self.report.ok:
            return
        self.check_logprobs()
        self.check_kept_ids()
        self.check_loss_mask()
        self.check_advantages()
        self.check_micro_batches()
        if not self.report.ok:
            return
        self.step()
        self.table()

    def table(self) -> None:
        worst = self.report.values["logprobs"]["max_abs_diff"]
        rows = []
        for name in LAYOUTS:
            cost = self.costs[name]
            memory = "n/a" if cost["peak_mb"] is None else f"{cost['peak_mb']:.0f}"
            figures = [f"{cost['tokens']:,}", f"{cost['patches']:,}", f"{cost['seconds']:.2f}"]
            rows.append([name, *figures, memory, f"{worst[name]:.1e}"])
        self.report.values["cost"] = self.costs
        columns = ["", "tokens", "patches", "seconds", "peak MB", "largest logprob difference"]
        self.report.table(columns, rows)
        self.report.say(
            f"parity ok over {self.report.values['parity']['compared']} samples, loss {self.loss:.2e}, "
            f"gradient norm {self.grad_norm:.4f}"
        )

    def set_advantages(self) -> None:
        """[B], over the whole batch, before it is planned and packed."""
        self.rewards = torch.tensor([sum(r.value for r in s.rewards or ()) for s in self.train])
        number = {s.group_id: i for i, s in enumerate(self.train)}
        group_index = torch.tensor([number[s.group_id] for s in self.train])
        self.advantages = mp.group_advantages(self.rewards, group_index, kind="grpo")
        if self.options.negate_advantages:
            self.advantages = -self.advantages

    def check_loss_mask(self) -> None:
        """Nothing outside the loss rows is read."""
        self.set_advantages()
        limit = max(1024, max(len(s) for s in self.train))
        members = mp.plan(self.train, max_tokens=limit, share_prefix=True).bins[0]
        batch = mp.pack([self.train[i] for i in members], share_prefix=True)
        with attach(self.model), torch.no_grad():
            logits = self.model(**model_inputs(batch, self.model)).logits[0]
        logits.requires_grad_()
        others = torch.ones(len(logits), dtype=torch.bool)
        others[batch.loss_rows_unique.long()] = False
        loss = self.loss_from_logits(logits, batch, members)
        loss.backward()
        outside = logits.grad[others].abs().max().item() if others.any() else 0.0
        with torch.no_grad():
            logits[others] = float("nan")
            again = self.loss_from_logits(logits, batch, members)
        leak = max(outside, 0.0 if torch.equal(loss, again) else 1.0)
        self.report.values["loss_mask"] = {"leak": leak, "rows": len(logits)}
        read = len(logits) - int(others.sum())
        self.report.check(
            "loss mask", leak == 0.0, f"leak {leak}, {read} of {len(logits)} rows are read"
        )

    def loss_from_logits(self, logits: torch.Tensor, batch: Any, members: list[int]) -> Any:
        lp: Any = mp.selected_logprobs(
            logits,
            batch.loss_targets,
            batch.loss_rows,
            temperature=self.temperature,
            support=batch.kept_ids,
        )
        return mp.policy_loss(lp, self.advantages[members], batch.cu_loss).loss

    def check_advantages(self) -> None:
        """Rewards and advantages against plain Python."""
        batch = mp.pack(self.train)
        scattered = [x.sum().item() for x in batch.unpack_loss(mp.scatter_rewards(batch))]
        wanted = [sum(r.value for r in s.rewards or ()) for s in self.train]
        off = float(np.max(np.abs(np.subtract(scattered, wanted))))
        sign = -1.0 if self.options.negate_advantages else 1.0
        expected = [
            sign * a
            for a in plain_advantages(self.rewards.tolist(), [s.group_id for s in self.train])
        ]
        worst = float(np.max(np.abs(np.subtract(self.advantages.tolist(), expected))))
        self.report.values["advantages"] = {"max_abs_diff": worst}
        self.report.values["rewards"] = {"mean": statistics.fmean(wanted), "max_abs_diff": off}
        fine = worst <= TOLERANCES["advantage"].value and off <= TOLERANCES["advantage"].value
        self.report.check(
            "advantages", fine, f"off by {worst:.1e}; scattered rewards off by {off:.1e}"
        )

    def check_micro_batches(self) -> None:
        """One or five: the same loss and gradients."""
        whole = sum(len(s) for s in self.train)
        one = mp.plan(self.train, max_tokens=whole, share_prefix=True)
        ranks = min(5, len(self.train))
        five = mp.plan(self.train, max_tokens=whole, share_prefix=True, ranks=ranks)
        (loss1, grads1), (loss5, grads5) = self.gradients(one), self.gradients(five)
        off = relative_gap(grads1, grads5)
        self.model.double()  # a few samples once more, where rounding can't hide a wrong total
        few = self.train[: max(5, 2 * self.options.n)]
        plans = [
            mp.plan(few, max_tokens=whole, share_prefix=True, ranks=r)
            for r in (1, min(5, len(few)))
        ]
        exact = relative_gap(*(self.gradients(plan)[1] for plan in plans))
        self.model.float()
        scale = loss_bound(self.advantages.abs().sum().item(), len(self.train))
        self.loss, self.grad_norm = loss1, norm(grads1)
        self.report.values |= {
            "micro_batches": {
                "counts": [len(one.bins), len(five.bins)],
                "loss_diff": abs(loss1 - loss5),
                "grad_rel_diff": off,
                "grad_rel_diff_float64": exact,
            },
            "loss": loss1,
            "grad_norm": self.grad_norm,
        }
        fine = abs(loss1 - loss5) <= max(scale, 1e-9)
        fine &= exact <= TOLERANCES["parameter_gradient_fp32"].value
        counts = f"{len(one.bins)} and {len(five.bins)} micro-batches"
        self.report.check(
            "micro-batches",
            fine,
            f"{counts}: loss differs by {abs(loss1 - loss5):.1e}, gradients by {off:.1e} ({exact:.1e} in float64)",
        )

    def gradients(self, plan: mp.Plan) -> tuple[float, list[torch.Tensor]]:
        self.model.zero_grad()
        loss = sum(self.backward(members, plan) for members in plan.bins)
        return loss, [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def backward(self, members: list[int], plan: mp.Plan) -> float:
        """One micro-batch: pack, forward, loss, backward. Totals are the whole batch's, so losses add up."""
        samples = [self.train[i] for i in members]
        batch = mp.pack(samples, share_prefix=True)
        with attach(self.model):
            lp = packed_logprobs(self.model, batch, self.temperature)
            out = mp.policy_loss(
                lp,
                self.advantages[members],
                batch.cu_loss,
                rollout_logprobs=batch.loss_columns["rollout_logprobs"],
                correction="tis",
                total_tokens=plan.total_tokens,
                total_samples=plan.total_samples,
            )
            out.loss.backward()
        return out.loss.item()

    def step(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        plan = mp.plan(self.train, max_tokens=self.budget(), share_prefix=True)
        self.gradients(plan)
        optimizer.step()
        with torch.no_grad(), attach(self.model):
            new, _ = self.scored(plan.bins, partial(mp.pack, share_prefix=True))
        ratio = torch.exp(new - self.old_logprobs)
        counts = torch.tensor([s.num_loss_tokens for s in self.train])
        gain = ((ratio - 1) * self.advantages.repeat_interleave(counts)).mean().item()
        figures = {name: getattr(ratio, name)().item() for name in ("mean", "min", "max")}
        self.report.values["ratio"] = figures | {"gain": gain}
        fine = gain > 0 or self.grad_norm == 0
        self.report.check(
            "step",
            fine,
            f"loss {self.loss:.2e}, gradient norm {self.grad_norm:.4f}, ratio "
            f"{ratio.min():.4f} to {ratio.max():.4f}, surrogate gain {gain:.2e}",
        )


def plain_advantages(rewards: Sequence[float], groups: Sequence[str]) -> list[float]:
    """GRPO's advantages in plain Python: (reward - mean) / standard deviation of its group."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
        out.append((reward - statistics.fmean(mine)) / (spread + 1e-6) if spread > 1e-9 else 0.0)
    return out


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.sqrt(sum((t.double() ** 2).sum() for t in tensors)))  # type: ignore[arg-type]


def relative_gap(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Frobenius norm of the difference over that of `a`."""
    gap = norm([x - y for x, y in zip(a, b, strict=True)])
    return gap / norm(a) if norm(a) > 0 else gap
