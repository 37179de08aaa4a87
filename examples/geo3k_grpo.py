"""One GRPO step on Geometry3K: from real pictures to an optimizer step, with every check on the way.

Read it top to bottom: it is a tutorial, and it is what `mmpack smoke` runs. The five parts of a step are

    rollout   an engine samples responses and says what it saw          -> rollout.jsonl
    train     the trainer's side of the same samples, from the same ids -> train.jsonl
    parity    both sides are compared before any number is
    pack      no padding, shared prompts and pictures once
    loss      log-probabilities of the sampled tokens alone, advantages, GRPO, AdamW
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import mmpack as mp
from mmpack.adapters.datasets import load_problems
from mmpack.adapters.problems import Problem
from mmpack.adapters.qwen_processor import qwen_vl_processor
from mmpack.adapters.transformers import attach, packed_logprobs, rollout, tiny_qwen2_5_vl
from mmpack.adapters.transformers import inject as broken
from mmpack.adapters.transformers.load import load_checkpoint
from mmpack.contracts import TOLERANCES, loss_bound

MAX_PIXELS = 256 * 28 * 28  # at most 256 vision tokens a picture: quick on two cores
MICRO_BATCH = 4096  # packed rows
LAYOUTS = ("packed", "shared_prefix", "padded_left", "padded_right")


@dataclass
class SmokeOptions:
    data: str | None = None  # folder, parquet or hub name; None: problems that mmpack draws
    model: str | None = None  # checkpoint; None: 20 M parameters, seeded, random
    n: int = 4  # responses a prompt
    seed: int = 0
    max_new_tokens: int = 24
    temperature: float = 1.0
    limit: int | None = None  # problems
    workdir: Path | None = None  # keeps the traces; None: a temporary folder
    inject: str | None = None  # a cause of drift, put into the train side
    learn: bool = False
    negate_advantages: bool = False


@dataclass
class Report:
    """What `--json` prints; `failed` names the checks that did not hold."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "failed": self.failed} | self.values


def run(options: SmokeOptions, console: Console | None = None) -> Report:
    """The whole job. Every check prints its figure; the first that fails ends it before a step is taken."""
    job = Job(options, console or Console())
    with job.folder():
        if options.learn:
            job.learn()
            return job.report
        for part in (job.sample_responses, job.build_train_side, job.check_parity):
            part()
        if job.report.ok:
            for check in (
                job.check_logprobs,
                job.check_loss_mask,
                job.check_advantages,
                job.check_micro_batches,
            ):
                check()
        if job.report.ok:
            job.step()
            job.table()
    return job.report


class Job:
    def __init__(self, options: SmokeOptions, console: Console):
        if options.learn:  # eight problems, small pictures, eight responses each: quick steps
            options = replace(options, n=8, limit=min(options.limit or 8, 8), max_new_tokens=3)
        self.options, self.console, self.report = options, console, Report()
        torch.manual_seed(options.seed)
        self.problems = load_problems(options.data, limit=options.limit)
        if options.model is None:
            pixels = MAX_PIXELS // 8 if options.learn else MAX_PIXELS
            self.hf_processor = qwen_vl_processor(max_pixels=pixels)
            self.model = tiny_qwen2_5_vl(options.seed)
        else:
            self.model, self.hf_processor = load_checkpoint(options.model)
        self.messages = [as_messages(p) for p in self.problems]
        cause = options.inject
        self.processor = (
            broken.broken_processor(cause, self.hf_processor)
            if cause
            else mp.wrap_processor(self.hf_processor)
        )
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        console.print(f"{len(self.problems)} problems, a model of {size:.1f} M parameters")

    @contextmanager
    def folder(self) -> Iterator[None]:
        """Where the traces lie: kept if the caller named it."""
        kept = self.options.workdir
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
        with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as path:
            self.path = Path(path)
            yield

    # -- rollout: what the engine sampled, and what it saw ------------------------------------------------------------

    def sample_responses(self) -> None:
        start = time.perf_counter()
        self.rollouts = self.roll()
        if self.options.inject == "sampled_placeholder":
            broken.sampled_placeholder(self.rollouts)
        mp.write_trace(self.path / "rollout.jsonl", self.rollouts)
        tokens = sum(s.num_loss_tokens for s in self.rollouts)
        took = time.perf_counter() - start
        self.console.print(
            f"rollout: {len(self.rollouts)} responses, {tokens} tokens, {took:.1f} s"
        )

    def roll(self) -> list[mp.Sample]:
        return rollout(
            self.model,
            self.hf_processor,
            self.messages,
            [p.problem_id for p in self.problems],
            n=self.options.n,
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
        )

    # -- train: the same samples, from messages and response *ids* ----------------------------------------------------

    def build_train_side(self) -> None:
        cause = self.options.inject
        width = max(len(s) for s in self.rollouts)
        self.train = []
        for b, rolled in enumerate(self.rollouts):
            problem = self.problems[b // self.options.n]
            messages = self.messages[b // self.options.n]
            response = rolled.input_ids[rolled.loss_indices]
            logprobs = rolled.rollout_logprobs
            if cause:
                messages = broken.broken_messages(cause, messages)
                response = broken.broken_response(cause, response, self.hf_processor.tokenizer)
                logprobs = logprobs if len(response) == rolled.num_loss_tokens else None
            sample = self.processor(
                messages,
                response,
                sample_id=rolled.sample_id,
                group_id=rolled.group_id,
                rollout_logprobs=logprobs,
                sampling=rolled.sampling,
                finish_reason=rolled.finish_reason,
                rewards=self.score(problem, response),
            )
            self.train.append(broken.broken_sample(cause, sample, width) if cause else sample)
        mp.write_trace(self.path / "train.jsonl", self.train)

    def score(self, problem: Problem, response: Any) -> list[mp.Score]:
        """An exact answer, a format part (a letter or a number, boxed or bare), and a small price for length."""
        text = self.hf_processor.tokenizer.decode(response.tolist(), skip_special_tokens=True)
        boxed = re.search(r"\\boxed\{([^{}]*)\}", text)
        answer = boxed.group(1).strip() if boxed else text.strip()
        formed = re.fullmatch(r"[A-D]|-?\d+(\.\d+)?", answer) is not None
        return [
            mp.Score("exact", float(answer in (problem.answer, problem.answer_letter))),
            mp.Score("format", 0.2 * formed),
            mp.Score("length", -len(text) / 10_000),
        ]

    # -- parity: layouts before numbers -------------------------------------------------------------------------------

    def check_parity(self) -> None:
        report = mp.compare(self.path / "rollout.jsonl", self.path / "train.jsonl")
        values = self.report.values
        values["parity"] = {"ok": report.ok, "compared": report.compared}
        if report.first is not None:
            values["first"] = {
                "cause": report.first.cause,
                "sample_id": report.first.sample_id,
                "field": report.first.field,
                "message": str(report.first),
            }
        self.say("parity", report.ok, report.summary())
        for finding in report.findings[:3]:
            self.console.print(f"  {finding}", markup=False, soft_wrap=True)

    # -- log-probabilities: four layouts of one batch, each against the rollout's -------------------------------------

    def check_logprobs(self) -> None:
        plain = mp.plan(self.train, max_tokens=self.budget(), share_prefix=False)
        shared = mp.plan(self.train, max_tokens=self.budget(), share_prefix=True)
        rectangle = 4 * self.options.n
        slices = [
            list(range(i, min(i + rectangle, len(self.train))))
            for i in range(0, len(self.train), rectangle)
        ]
        makers: dict[str, tuple[list[list[int]], Callable[..., Any]]] = {
            "packed": (plain.bins, mp.pack),
            "shared_prefix": (shared.bins, lambda s: mp.pack(s, share_prefix=True)),
            "padded_left": (slices, lambda s: mp.pad(s, side="left")),
            "padded_right": (slices, lambda s: mp.pad(s, side="right")),
        }
        rolled = torch.cat([torch.from_numpy(s.rollout_logprobs) for s in self.train])
        self.costs: dict[str, dict[str, Any]] = {}
        found = {}
        for name, (bins, make) in makers.items():
            with torch.no_grad(), PeakMemory() as peak, self.attention(name):
                start = time.perf_counter()
                pieces: list[Any] = [None] * len(self.train)
                tokens = patches = 0
                for members in bins:
                    batch = make([self.train[i] for i in members])
                    lp = packed_logprobs(self.model, batch, self.options.temperature)
                    for i, piece in zip(members, batch.unpack_loss(lp), strict=True):
                        pieces[i] = piece
                    tokens += batch.stats["tokens"]
                    patches += batch.stats["patches_encoded"]
                took = time.perf_counter() - start
            found[name] = torch.cat(pieces)
            self.costs[name] = {
                "tokens": tokens,
                "patches": patches,
                "seconds": took,
                "peak_mb": peak.megabytes,
            }
        self.old_logprobs = found["shared_prefix"]
        worst = {k: (v - rolled).abs().max().item() for k, v in found.items()}
        whole = torch.stack(list(found.values()))
        apart = (whole - found["packed"]).abs().max().item()
        self.report.values["logprobs"] = {"max_abs_diff": worst, "between_layouts": apart}
        for key in ("tokens", "patches"):
            self.report.values[key] = {
                "padded": self.costs["padded_left"][key],
                "packed": self.costs["packed"][key],
                "shared_prefix": self.costs["shared_prefix"][key],
            }
        fine = all(v <= TOLERANCES["generate"].value for v in worst.values())  # NaN is not <=
        fine &= apart <= TOLERANCES["layouts"].value
        figures = ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
        self.say("logprobs", fine, f"against the rollout's: {figures}; between layouts {apart:.1e}")

    def attention(self, layout: str) -> Any:
        """Packed rows need mmpack's attention; rectangles run with the model's own."""
        return attach(self.model) if layout in ("packed", "shared_prefix") else nullcontext()

    def budget(self) -> int:
        return max(MICRO_BATCH, max(len(s) for s in self.train))

    # -- loss mask: nothing outside the loss rows is read -------------------------------------------------------------

    def set_advantages(self) -> None:
        """[B], over the whole batch, before it is planned and packed."""
        self.rewards = torch.tensor([sum(r.value for r in s.rewards or ()) for s in self.train])
        number = {s.group_id: i for i, s in enumerate(self.train)}
        group_index = torch.tensor([number[s.group_id] for s in self.train])
        self.advantages = mp.group_advantages(self.rewards, group_index, kind="grpo")
        if self.options.negate_advantages:
            self.advantages = -self.advantages

    def check_loss_mask(self) -> None:
        self.set_advantages()
        limit = max(1024, max(len(s) for s in self.train))
        members = mp.plan(self.train, max_tokens=limit, share_prefix=True).bins[0]
        batch = mp.pack([self.train[i] for i in members], share_prefix=True)
        with attach(self.model), torch.no_grad():
            logits = self.model(**batch.model_inputs(self.model)).logits[0]
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
        self.say("loss mask", leak == 0.0, f"leak {leak}, {read} of {len(logits)} rows are read")

    def loss_from_logits(self, logits: torch.Tensor, batch: Any, members: list[int]) -> Any:
        lp: Any = mp.selected_logprobs(
            logits, batch.loss_targets, batch.loss_rows, temperature=self.options.temperature
        )
        return mp.policy_loss(lp, self.advantages[members], batch.cu_loss).loss

    # -- rewards and advantages: against plain Python -----------------------------------------------------------------

    def check_advantages(self) -> None:
        batch = mp.pack(self.train)
        scattered = [x.sum().item() for x in batch.unpack_loss(mp.scatter_rewards(batch))]
        wanted = [sum(r.value for r in s.rewards or ()) for s in self.train]
        apart = float(np.max(np.abs(np.subtract(scattered, wanted))))
        sign = -1.0 if self.options.negate_advantages else 1.0
        expected = [
            sign * a
            for a in plain_advantages(self.rewards.tolist(), [s.group_id for s in self.train])
        ]
        worst = float(np.max(np.abs(np.subtract(self.advantages.tolist(), expected))))
        self.report.values["advantages"] = {"max_abs_diff": worst}
        self.report.values["rewards"] = {"mean": statistics.fmean(wanted), "max_abs_diff": apart}
        fine = worst <= TOLERANCES["advantage"].value and apart <= TOLERANCES["advantage"].value
        self.say("advantages", fine, f"off by {worst:.1e}; scattered rewards off by {apart:.1e}")

    # -- micro-batches: one or five, the same loss and gradients ------------------------------------------------------

    def check_micro_batches(self) -> None:
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
        self.say(
            "micro-batches",
            fine,
            f"{counts}: loss {abs(loss1 - loss5):.1e} apart, gradients {off:.1e} ({exact:.1e} in float64)",
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
            lp = packed_logprobs(self.model, batch, self.options.temperature)
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

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        plan = mp.plan(self.train, max_tokens=self.budget(), share_prefix=True)
        self.gradients(plan)
        optimizer.step()
        new: list[Any] = [None] * len(self.train)
        with torch.no_grad(), attach(self.model):
            for members in plan.bins:
                batch = mp.pack([self.train[i] for i in members], share_prefix=True)
                lp = packed_logprobs(self.model, batch, self.options.temperature)
                for i, piece in zip(members, batch.unpack_loss(lp), strict=True):
                    new[i] = piece
        ratio = torch.exp(torch.cat(new) - self.old_logprobs)
        counts = torch.tensor([s.num_loss_tokens for s in self.train])
        gain = ((ratio - 1) * self.advantages.repeat_interleave(counts)).mean().item()
        self.report.values["ratio"] = {
            "mean": ratio.mean().item(),
            "min": ratio.min().item(),
            "max": ratio.max().item(),
            "gain": gain,
        }
        fine = gain > 0 or self.grad_norm == 0
        self.say(
            "step",
            fine,
            f"loss {self.loss:.2e}, gradient norm {self.grad_norm:.4f}, ratio "
            f"{ratio.min():.4f} to {ratio.max():.4f}, surrogate gain {gain:.2e}",
        )

    def table(self) -> None:
        table = Table("", "tokens", "patches", "seconds", "peak MB", "largest logprob difference")
        worst = self.report.values["logprobs"]["max_abs_diff"]
        for name in LAYOUTS:
            cost = self.costs[name]
            memory = "n/a" if cost["peak_mb"] is None else f"{cost['peak_mb']:.0f}"
            table.add_row(
                name,
                f"{cost['tokens']:,}",
                f"{cost['patches']:,}",
                f"{cost['seconds']:.2f}",
                memory,
                f"{worst[name]:.1e}",
            )
        self.report.values["cost"] = self.costs
        self.console.print(table)
        self.console.print(
            f"parity ok over {self.report.values['parity']['compared']} samples, loss {self.loss:.2e}, "
            f"gradient norm {self.grad_norm:.4f}"
        )

    # -- --learn: the sign of everything ------------------------------------------------------------------------------

    def learn(self, supervised: int = 40, steps: int = 25) -> None:
        """Supervised steps that teach the format with letters at random, then GRPO, which must find the right ones."""
        optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.0)
        draw = torch.Generator().manual_seed(self.options.seed)
        for _ in range(supervised):
            loss = self.supervised_loss(draw)
            self.update(optimizer)
        before = self.mean_reward()
        self.console.print(f"supervised: loss {loss:.3f}, mean reward {before:.3f}")
        for group in optimizer.param_groups:
            group["lr"] = 2e-3
        for k in range(steps):
            self.rollouts = self.roll()
            self.build_train_side()
            self.set_advantages()
            plan = mp.plan(self.train, max_tokens=self.budget(), share_prefix=True)
            self.model.zero_grad()
            for members in plan.bins:
                self.backward(members, plan)
            self.update(optimizer)
            self.console.print(f"GRPO step {k + 1}: mean reward {self.rewards.mean():.3f}")
        after = self.mean_reward()
        self.report.values["learn"] = {"before": before, "after": after, "gain": after - before}
        self.say("learn", after - before >= 0.2, f"mean reward {before:.3f} -> {after:.3f}")

    def supervised_loss(self, draw: torch.Generator) -> float:
        """One backward over all problems, each with a letter at random as its answer."""
        samples = []
        for problem, messages in zip(self.problems, self.messages, strict=True):
            letter = "ABCD"[int(torch.randint(4, (1,), generator=draw))]
            ids = self.hf_processor.tokenizer(f"{letter}<|im_end|>")["input_ids"]
            samples.append(self.processor(messages, ids, sample_id=problem.problem_id))
        self.model.zero_grad()
        with attach(self.model):
            loss = -packed_logprobs(self.model, mp.pack(samples)).mean()
            loss.backward()
        return loss.item()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()

    def mean_reward(self) -> float:
        """Over all prompts, n responses each, from a seed of its own."""
        state = torch.random.get_rng_state()
        torch.manual_seed(1234)
        rolled = self.roll()
        torch.random.set_rng_state(state)
        totals = []
        for b, s in enumerate(rolled):
            scores = self.score(self.problems[b // self.options.n], s.input_ids[s.loss_indices])
            totals.append(sum(r.value for r in scores))
        return statistics.fmean(totals)

    def say(self, name: str, fine: bool, figure: str) -> None:
        mark = "[green]ok[/]" if fine else "[red]FAILED[/]"
        self.console.print(f"{mark} {name}: {figure}", soft_wrap=True)
        if not fine:
            self.report.failed.append(name)


def as_messages(problem: Problem) -> list[dict[str, Any]]:
    """Pictures first, then the question and its choices."""
    choices = "  ".join(
        f"{letter}. {c}" for letter, c in zip("ABCD", problem.choices, strict=False)
    )
    ask = "Answer with the letter alone." if choices else "Answer with the value in \\boxed{}."
    parts: list[dict[str, Any]] = [{"type": "image", "image": i} for i in problem.images]
    text = "\n".join(t for t in (problem.prompt, choices, ask) if t)
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


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


class PeakMemory:
    """The process's largest resident memory inside the block, above what it had before; Linux alone."""

    megabytes: float | None = None

    def __enter__(self) -> PeakMemory:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # memory kept from before would hide what this block takes
        self.stop = threading.Event()
        self.before = self.peak = resident()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop.wait(0.005):
            self.peak = max(self.peak, resident())

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        self.megabytes = (self.peak - self.before) / 1e6 if self.before else None


def resident() -> int:
    """Bytes; 0 where /proc does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


if __name__ == "__main__":
    raise SystemExit(run(SmokeOptions()).exit_code)
