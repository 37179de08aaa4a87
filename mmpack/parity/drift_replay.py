"""Kept ids and routes of two sides as causes of a drift of logprobs, collected sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.parity.causes.replay import unlike_experts, unlike_lists
from mmpack.parity.sampling import cuts_ids
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import rows_read
from mmpack.schema.sample import Sample


@dataclass
class ComparedRoutes:
    """Counts of a rollout's experts against a trainer's, added sample by sample."""

    tokens: int = 0  # that a logprob reads, where both sides have routes
    unlike: int = 0  # of these, with other experts
    first_layer: int | None = None  # where they part
    other_shape: int = 0  # samples whose routes are of another number of layers, experts or tokens
    rollout_only: int = 0  # samples
    train_only: int = 0

    def add(self, sample: Sample, routes: np.ndarray | None) -> None:
        """Args: `sample`: of the rollout. `routes` [L, layers, k]: the trainer's, None where it has none."""
        mine = sample.routed_experts
        if mine is None or routes is None:
            self.rollout_only += mine is not None
            self.train_only += routes is not None
        elif mine.shape != routes.shape:
            self.other_shape += 1
        else:
            rows = rows_read(len(sample), sample.loss_indices)
            unlike = unlike_experts(mine[:rows], routes[:rows])
            self.tokens += rows
            self.unlike += int(unlike.any(axis=1).sum())
            if unlike.any():
                layer = int(np.argmax(unlike.any(axis=0)))
                self.first_layer = min(
                    layer, layer if self.first_layer is None else self.first_layer
                )

    def evidence(self, drifts: bool) -> str:
        """Why routes are a cause of drift; nothing if they are none. Routes of one side say so if there is drift."""
        out = []
        if self.unlike:
            out.append(
                f"{self.unlike} of {self.tokens} tokens that a logprob reads take other experts, the first in layer "
                f"{self.first_layer}"
            )
        if self.other_shape:
            out.append(f"{_samples(self.other_shape)} routes of other layers, experts or tokens")
        if self.rollout_only and drifts:
            out.append(
                "the rollout recorded the experts of each token, the trainer's are not known"
            )
        if self.train_only and drifts:
            out.append("the trainer recorded the experts of each token, the rollout did not")
        return "; ".join(out)


@dataclass
class ComparedKept:
    """Counts of the ids that a rollout's logprobs are over against a trainer's, added sample by sample.

    Raw logprobs are over all ids, whatever the sampler left.
    """

    samples: int = 0
    over_all: int = 0  # of these, with raw logprobs on both sides
    lists: int = 0  # where both sides have some
    unlike: int = 0  # of these
    other_count: int = 0  # samples whose lists are of another number of loss tokens
    rollout_only: int = 0  # samples, and below their lists and ids
    rollout_lists: int = 0
    rollout_ids: int = 0
    filtered: int = 0  # samples whose sampler left ids out, and recorded none
    train_only: int = 0
    known: bool = True  # whether the trainer's are

    def add(
        self, sample: Sample, kept: Ragged | None, known: bool = True, filtered: bool = False
    ) -> None:
        """Take in one pair.

        Args:
            sample: of the rollout.
            kept: the trainer's lists, None where it takes all ids, or where that is not `known`.
            filtered: whether its logprobs are said to be under a sampler's filters too.
        """
        self.samples += 1
        self.known &= known and not filtered
        raw = (sample.sampling or {}).get("logprobs") == "raw"
        mine = None if raw else sample.kept_ids
        if mine is not None and kept is not None:
            if len(mine) != len(kept):
                self.other_count += 1
                return
            self.lists += len(mine)
            self.unlike += int(unlike_lists(mine, kept).sum())
        elif mine is not None:
            self.rollout_only += 1
            self.rollout_lists += len(mine)
            self.rollout_ids += len(mine.ids)
        elif kept is not None:
            self.train_only += 1
        else:
            self.over_all += raw
            self.filtered += not filtered and cuts_ids(sample.sampling)

    def evidence(self, drifts: bool, falls: bool) -> str:
        """Why kept ids are a cause of drift; nothing if they are none. Lists of one side say so if there is drift.

        Args: `falls`: whether the trainer's logprobs are the lower ones on average, as over all ids they are.
        """
        out = []
        if self.unlike:
            out.append(f"{self.unlike} of {self.lists} lists of kept ids differ")
        if self.other_count:
            out.append(f"{_samples(self.other_count)} kept ids of another number of loss tokens")
        if not drifts:
            return "; ".join(out)
        if self.rollout_only and (self.known or falls):
            mean = self.rollout_ids / max(self.rollout_lists, 1)
            theirs = "the trainer's over all" if self.known else "the trainer's are not known"
            out.append(
                f"the rollout's logprobs are over the ids that the sampler kept ({mean:.1f} on average), {theirs}"
            )
        if self.filtered and falls:
            out.append(
                f"{_samples(self.filtered)} logprobs over what the sampler's filters left, and no kept_ids"
            )
        if self.train_only:
            out.append("the trainer's logprobs are over kept ids, the rollout's are not")
        return "; ".join(out)

    @property
    def rules_out(self) -> bool:
        """Whether both sides are known to take the same ids."""
        if self.over_all == self.samples:
            return True
        one_sided = self.rollout_only or self.filtered or self.train_only or self.other_count
        return bool(self.lists) and not (self.unlike or one_sided)


def routes_of(
    samples: Sequence[Sample], given: Sequence[np.ndarray | None] | ComparedRoutes | None
) -> ComparedRoutes:
    """Raises: ArgumentError for what are no routes."""
    if isinstance(given, ComparedRoutes):
        return given
    compared = ComparedRoutes()
    theirs = [None] * len(samples) if given is None else given
    for i, routes in enumerate(per_sample("routed_experts", theirs, len(samples))):
        compared.add(samples[i], None if routes is None else _route_column(routes, i))
    return compared


def kept_of(
    samples: Sequence[Sample], given: Sequence[Ragged | None] | ComparedKept | None
) -> ComparedKept:
    """Raises: ArgumentError for what are no lists."""
    if isinstance(given, ComparedKept):
        return given
    compared = ComparedKept()
    theirs = [None] * len(samples) if given is None else given
    for i, kept in enumerate(per_sample("kept_ids", theirs, len(samples))):
        if kept is not None and not isinstance(kept, Ragged):
            raise ArgumentError(
                f"logprob_drift: kept_ids[{i}] is {kind_of(kept)}, expected a Ragged or None. "
                "Fix: pass kept_ids of the trainer's samples, None for one that takes all ids"
            )
        compared.add(samples[i], kept, known=given is not None)
    return compared


def per_sample(name: str, given: Any, count: int) -> Sequence[Any]:
    """Raise ArgumentError unless there is one entry per sample."""
    if not hasattr(given, "__len__") or len(given) != count:
        found = f"has {len(given)} entries" if hasattr(given, "__len__") else f"is {kind_of(given)}"
        raise ArgumentError(
            f"logprob_drift: {name} {found}, there are {count} samples. Fix: pass one entry per sample"
        )
    return given


def _samples(count: int) -> str:
    return "1 sample has" if count == 1 else f"{count} samples have"


def _route_column(routes: Any, i: int) -> np.ndarray:
    """Integers [L, layers, k]. Raises: ArgumentError."""
    try:
        array = np.asarray(routes)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = np.zeros(0)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"logprob_drift: routed_experts[{i}] is not an integer array [L, layers, k]. "
            "Fix: pass what record_routes returned, by sample"
        )
    return array
