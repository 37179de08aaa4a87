"""One call of the divergence as two records: the tensors that it reads, and what it does with them. How much teachers
count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mmpack.losses.samples import check_weights
from mmpack.ops.segments import entry_segments

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["bucket", "renormalize", "ignore"]

# What the ids beyond a list have at least of the probability, as in TRL: -expm1(-1e-7).
LEAST_REST = 9.999999500000016e-08


class Columns(NamedTuple):
    """Entries [M] of N lists, those of a loss token side by side."""

    logprobs: Tensor  # [M] float, of the policy
    teacher: Tensor  # [M] float, of the teacher
    offsets: Tensor  # [N + 1] int64

    @property
    def bounds(self) -> Tensor:
        """Offsets that name no entry beyond M."""
        return self.offsets.clamp(0, len(self.logprobs))

    @property
    def tokens(self) -> Tensor:
        """The loss token of each entry, [M] int64."""
        return entry_segments(self.offsets, len(self.logprobs))


class Options(NamedTuple):
    kind: Kind
    tail: Tail
    beta: float  # of jsd
    least: float  # logprobs below count as this; -infinity: none do


def weights_of(what: str, teachers: Mapping[str, Any], weights: Any) -> dict[str, float]:
    """The weight of each teacher; 1 where there are no weights."""
    if weights is None:
        return dict.fromkeys(teachers, 1.0)
    check_weights(what, weights, teachers, least=0)
    return {name: float(weights[name]) for name in teachers}


def weighed(values: Tensor, weight: Tensor | float) -> Tensor:
    """weight · values; 0 where the weight is 0, whatever the value is."""
    factor = weight if isinstance(weight, Tensor) else values.new_full((), weight)
    return torch.where(factor == 0, 0.0, values * factor)
