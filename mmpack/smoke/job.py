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

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    load_checkpoint,
    model_inputs,
    packed_logprobs,
    rollout,
)
from mmpack.contracts import TOLERANCES, loss_bound
from mmpack.families import get_family
from mmpack.smoke.clips import clip_exercises
from mmpack.smoke.datasets import load_exercises
from mmpack.smoke.exercise import Exercise
from mmpack.smoke.options import SmokeOptions
from mmpack.smoke.qwen_processor import qwen_vl_processor
from mmpack.smoke.tiny_models import tiny_model

MAX_PIXELS = 256 * 28 * 28  # at most 256 vision tokens per picture: quick on two cores
CLIP_PIXELS = 16 * 28 * 28  # of a frame; Qwen3-VL bounds all frames together
CLIP_FRAMES = 12
FPS = 2.0  # frames taken per second
MICRO_BATCH = 4096  # packed rows
# What kept ids are shown with; a tiny random model is so flat that only a tenth of the temperature leaves few of them.
FILTERS: dict[str, Any] = {"top_p": 0.8, "top_k": 1024}
FLAT, SHORT = 0.1, 8
LAYOUTS = ("packed", "shared_prefix", "padded_left", "padded_right")


class Job:
    """`with Job(options, report) as job: job.run()`. Every check goes to the report with its figure."""

    bound = TOLERANCES["generate"].value  # of logprobs against the rollout's
    old_logprobs: torch.Tensor  # [N] of the whole batch, once parity holds

    def __init__(self, options: SmokeOptions, report: Any):
        self.options, self.report = options, report

    def __enter__(self) -> Job:
        torch.manual_seed(self.options.seed)
        kept = self.options.workdir  # else the traces lie in a temporary folder
        self.folder: Any = nullcontext(kept) if kept else tempfile.TemporaryDirectory()
        self.path = Path(self.folder.__enter__())
        self.path.mkdir(parents=True, exist_ok=True)
        self.exercises = self.load_exercises()
        self.messages = [as_messages(exercise) for exercise in self.exercises]
        self.model, self.hf_processor = self.load()
        self.processor = self.wrap(self.hf_processor)
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        self.report.say(f"{len(self.exercises)} problems, a model of {size:.1f} M parameters")
        return self

    def __exit__(self, *error: Any) -> None:
        self.folder.__exit__(*error)

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

    # -- exercises, model and processor --------------------------------------------------------------------------------

    def load_exercises(self) -> list[Exercise]:
        if self.options.video:
            return clip_exercises(seed=self.options.seed)[: self.options.limit]
        return load_exercises(self.options.data, limit=self.options.limit)

    def load(self) -> tuple[Any, Any]:
        if self.options.model is not None:
            return load_checkpoint(self.options.model)
        return tiny_model(self.options.family, self.options.seed), self.tiny_processor()

    def tiny_processor(self) -> Any:
        family = self.options.family
        if not self.options.video:
            pixels = MAX_PIXELS // 8 if self.options.learn else MAX_PIXELS
        elif get_family(family).video_layout == "frames":
            pixels = CLIP_PIXELS * CLIP_FRAMES
        else:
            pixels = CLIP_PIXELS
        return qwen_vl_processor(family, min_pixels=4 * 28 * 28, max_pixels=pixels)

    def wrap(self, hf_processor: Any) -> Any:
        """The trainer's processor: messages and response ids in, a Sample out."""
        return mp.wrap_processor(hf_processor, video_settings=self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """How videos are sampled, on both sides."""
        return {"fps": FPS}

    # -- rollout: what the engine sampled, and what it saw ------------------------------------------------------------

    def sample_responses(self) -> None:
        start = time.perf_counter()
        self.rollouts = self.roll()
        mp.write_trace(self.path / "rollout.jsonl", self.rollouts)
        tokens = sum(s.num_loss_tokens for s in self.rollouts)
        took = time.perf_counter() - start
        self.report.say(f"rollout: {len(self.rollouts)} responses, {tokens} tokens, {took:.1f} s")

    def roll(self) -> list[mp.Sample]:
        return rollout(
            self.model,
            self.hf_processor,
            self.messages,
            [p.exercise_id for p in self.exercises],
            n=self.options.n,
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            video_settings=self.sampling,
        )

    @property
    def temperature(self) -> float:
        """Of the logprobs that are compared and trained on: raw ones are the model's own, whatever the sampler did."""
        raw = (self.rollouts[0].sampling or {}).get("logprobs") == "raw"
        return 1.0 if raw else self.options.temperature

    # -- train: the same samples, from messages and response *ids* ----------------------------------------------------

    def build_train_side(self) -> None:
        self.train = [self.train_sample(b) for b in range(len(self.rollouts))]
        mp.write_trace(self.path / "train.jsonl", self.train)

    def train_sample(self, b: int) -> mp.Sample:
        rolled = self.rollouts[b]
        return self.trained(
            b, self.messages[b // self.options.n], rolled.input_ids[rolled.loss_indices]
        )

    def trained(self, b: int, messages: Any, response: np.ndarray) -> mp.Sample:
        """What the trainer makes of the messages, and of the ids that were sampled, with their rewards."""
        rolled = self.rollouts[b]
        same_ids = len(response) == rolled.num_loss_tokens
        return self.processor(
            messages,
            response,
            sample_id=rolled.sample_id,
            group_id=rolled.group_id,
            rollout_logprobs=rolled.rollout_logprobs if same_ids else None,
            kept_ids=rolled.kept_ids if same_ids else None,
            sampling=rolled.sampling,
            finish_reason=rolled.finish_reason,
            rewards=self.score(self.exercises[b // self.options.n], response),
        )

    def score(self, exercise: Exercise, response: Any) -> list[mp.Score]:
        """An exact answer, a format part (a letter or a number, boxed or bare), and a small price for length."""
        text = self.hf_processor.tokenizer.decode(response.tolist(), skip_special_tokens=True)
        boxed = re.search(r"\\boxed\{([^{}]*)\}", text)
        answer = boxed.group(1).strip() if boxed else text.strip()
        formed = re.fullmatch(r"[A-D]|-?\d+(\.\d+)?", answer) is not None
        return [
            mp.Score("exact", float(answer in (exercise.answer, exercise.answer_letter))),
            mp.Score("format", 0.2 * formed),
            mp.Score("length", -len(text) / 10_000),
        ]

    # -- parity: layouts before numbers -------------------------------------------------------------------------------

    def check_parity(self) -> None:
        self.parity = report = mp.compare(self.path / "rollout.jsonl", self.path / "train.jsonl")
        values = self.report.values
        values["parity"] = {"ok": report.ok, "compared": report.compared}
        if report.first is not None:
            values["first"] = {
                "cause": report.first.cause,
                "sample_id": report.first.sample_id,
                "field": report.first.field,
                "message": str(report.first),
            }
        self.report.check("parity", report.ok, report.summary())
        for finding in report.findings[:3]:
            self.report.say(f"  {finding}")

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
            with torch.no_grad(), self.report.memory() as peak, self.attention(name):
                start = time.perf_counter()
                pieces: list[Any] = [None] * len(self.train)
                tokens = patches = 0
                for members in bins:
                    batch = make([self.train[i] for i in members])
                    lp = packed_logprobs(self.model, batch, self.temperature)
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
        between = (whole - found["packed"]).abs().max().item()
        self.report.values["logprobs"] = {"max_abs_diff": worst, "between_layouts": between}
        for key in ("tokens", "patches"):
            self.report.values[key] = {
                "padded": self.costs["padded_left"][key],
                "packed": self.costs["packed"][key],
                "shared_prefix": self.costs["shared_prefix"][key],
            }
        fine = all(v <= self.bound for v in worst.values())  # NaN is not <=
        fine &= between <= TOLERANCES["layouts"].value
        figures = ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
        self.report.check(
            "logprobs", fine, f"against the rollout's: {figures}; between layouts {between:.1e}"
        )

    def attention(self, layout: str) -> Any:
        """Packed rows need mmpack's attention; rectangles run with the model's own."""
        return attach(self.model) if layout in ("packed", "shared_prefix") else nullcontext()

    def budget(self) -> int:
        return max(MICRO_BATCH, max(len(s) for s in self.train))

    # -- kept ids: the policy has not changed, so ratios are 1 over the ids that it was sampled from -------------------

    def check_kept_ids(self) -> None:
        temperature = self.options.temperature if self.options.model else FLAT
        rollouts = self.roll_filtered(self.messages[:2], self.exercises[:2], temperature)
        batch = mp.pack([self.as_train(s) for s in rollouts], share_prefix=True)
        rolled, lists = batch.loss_columns["rollout_logprobs"], batch.kept_ids
        assert lists is not None
        with torch.no_grad(), attach(self.model):
            kept = packed_logprobs(self.model, batch, temperature)
            whole = packed_logprobs(self.model, batch, temperature, kept_ids=False)
        worst = (kept - rolled).abs().max().item()
        ratio, other = ((x - rolled).exp().mean().item() for x in (kept, whole))
        count = len(lists.ids) / len(lists)
        self.report.values["kept_ids"] = {
            "max_abs_diff": worst,
            "ratio": ratio,
            "ratio_over_all_ids": other,
            "ids_per_token": count,
        }
        self.report.check(
            "kept ids",
            worst <= self.bound,
            f"mean ratio {ratio:.3f} over the {count:.1f} ids per token that top-p and top-k left, "
            f"{other:.3f} over all ids",
        )

    def roll_filtered(
        self, messages: list[Any], exercises: list[Exercise], temperature: float
    ) -> list[mp.Sample]:
        return rollout(
            self.model,
            self.hf_processor,
            messages,
            [p.exercise_id for p in exercises],
            n=self.options.n,
            max_new_tokens=min(SHORT, self.options.max_new_tokens),
            temperature=temperature,
            video_settings=self.sampling,
            **FILTERS,
        )

    def as_train(self, rolled: mp.Sample) -> mp.Sample:
        """The trainer's side of a rollout of any of the exercises."""
        p = next(i for i, q in enumerate(self.exercises) if q.exercise_id == rolled.group_id)
        return self.processor(
            self.messages[p],
            rolled.input_ids[rolled.loss_indices],
            sample_id=rolled.sample_id,
            group_id=rolled.group_id,
            rollout_logprobs=rolled.rollout_logprobs,
            kept_ids=rolled.kept_ids,
            sampling=rolled.sampling,
        )

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

    # -- rewards and advantages: against plain Python -----------------------------------------------------------------

    def check_advantages(self) -> None:
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
                lp = packed_logprobs(self.model, batch, self.temperature)
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
        self.report.check(
            "step",
            fine,
            f"loss {self.loss:.2e}, gradient norm {self.grad_norm:.4f}, ratio "
            f"{ratio.min():.4f} to {ratio.max():.4f}, surrogate gain {gain:.2e}",
        )

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


def as_messages(exercise: Exercise) -> list[dict[str, Any]]:
    """Media first, then the question and its choices."""
    choices = "  ".join(
        f"{letter}. {c}" for letter, c in zip("ABCD", exercise.choices, strict=False)
    )
    ask = "Answer with the letter alone." if choices else "Answer with the value in \\boxed{}."
    parts: list[dict[str, Any]] = [{"type": "image", "image": i} for i in exercise.images]
    if exercise.video is not None:
        parts.append({"type": "video", "video": exercise.video})
    text = "\n".join(t for t in (exercise.prompt, choices, ask) if t)
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
