"""One call of the divergence as two records: the tensors that it reads, and what it does with them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

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
