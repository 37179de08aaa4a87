"""Log-probabilities of the sampled tokens in every layout, and over the ids that a sampler kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.contracts import TOLERANCES
from mmpack.demo.sides import Sides

MICRO_BATCH = 4096  # packed rows
# What kept ids are shown with; a tiny random model is so flat that only a tenth of the temperature leaves few of them.
FILTERS: dict[str, Any] = {"top_p": 0.8, "top_k": 1024}
FLAT, SHORT = 0.1, 8
COUNTED = {"tokens": "tokens", "patches": "patches_encoded"}  # name here -> in a batch's stats


class LogprobChecks(Sides):
    """Each against the rollout's own."""

    bound = TOLERANCES["generate"].value  # of logprobs against the rollout's
    old_logprobs: torch.Tensor  # [N] of the whole batch, once parity holds

    def check_logprobs(self) -> None:
        """Four layouts of one batch."""
        plain = mp.plan(self.train, max_tokens=self.budget(), share_prefix=False)
        shared = mp.plan(self.train, max_tokens=self.budget(), share_prefix=True)
        rectangle = 4 * self.options.n
        slices = [
            list(range(i, min(i + rectangle, len(self.train))))
            for i in range(0, len(self.train), rectangle)
        ]
        share = partial(mp.pack, share_prefix=True)
        makers: dict[str, tuple[list[list[int]], Callable[..., Any]]] = {
            "packed": (plain.bins, mp.pack),
            "shared_prefix": (shared.bins, share),
            "padded_left": (slices, partial(mp.pad, side="left")),
            "padded_right": (slices, partial(mp.pad, side="right")),
        }
        rolled = torch.cat([torch.from_numpy(s.rollout_logprobs) for s in self.train])
        self.costs: dict[str, dict[str, Any]] = {}
        found = {}
        for name, (bins, make) in makers.items():
            with torch.no_grad(), self.report.memory() as peak, self.attention(name):
                start = time.perf_counter()
                found[name], stats = self.scored(bins, make)
                took = time.perf_counter() - start
            counts = {key: sum(s[of] for s in stats) for key, of in COUNTED.items()}
            self.costs[name] = counts | {"seconds": took, "peak_mb": peak.megabytes}
        self.old_logprobs = found["shared_prefix"]
        worst = {k: (v - rolled).abs().max().item() for k, v in found.items()}
        whole = torch.stack(list(found.values()))
        between = (whole - found["packed"]).abs().max().item()
        self.report.values["logprobs"] = {"max_abs_diff": worst, "between_layouts": between}
        for key in ("tokens", "patches"):
            self.report.values[key] = {
                name.removesuffix("_left"): self.costs[name][key]
                for name in ("padded_left", "packed", "shared_prefix")
            }
        fine = all(v <= self.bound for v in worst.values())  # NaN is not <=
        fine &= between <= TOLERANCES["layouts"].value
        figures = ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
        self.report.check(
            "logprobs", fine, f"against the rollout's: {figures}; between layouts {between:.1e}"
        )

    def scored(
        self, bins: list[list[int]], make: Callable[..., Any]
    ) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """[N] logprobs of the train side in the order of its samples, and the stats of its batches."""
        pieces: list[Any] = [None] * len(self.train)
        stats = []
        for members in bins:
            batch = make([self.train[i] for i in members])
            lp = packed_logprobs(self.model, batch, self.temperature)
            for i, piece in zip(members, batch.unpack_loss(lp), strict=True):
                pieces[i] = piece
            stats.append(batch.stats)
        return torch.cat(pieces), stats

    def attention(self, layout: str) -> Any:
        """Packed rows need mmpack's attention; rectangles run with the model's own."""
        return attach(self.model) if layout in ("packed", "shared_prefix") else nullcontext()

    def budget(self) -> int:
        return max(MICRO_BATCH, max(len(s) for s in self.train))

    def check_kept_ids(self) -> None:
        """The policy has not changed, so ratios are 1 over the ids that it was sampled from."""
        temperature = self.options.temperature if self.options.model else FLAT
        most = min(SHORT, self.options.max_new_tokens)
        rollouts = self.sampled(slice(2), max_new_tokens=most, temperature=temperature, **FILTERS)
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
