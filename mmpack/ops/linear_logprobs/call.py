"""What both paths of linear_selected_logprobs work on: one call's inputs, its statistics, and what its backward begins
with.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmpack.ops.logprobs.row_groups import (
    RowGradients,
    RowGroups,
    Slots,
    by_slot,
    gather_gradients,
    slots_of,
)
from mmpack.ops.logprobs.softmax import target_gradient


class Call(NamedTuple):
    """One call: hidden [T, H], this rank's weight [V / ranks, H] and bias, targets [N] int64 in [0, V)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    runs: RowGroups
    temperature: float
    softcap: float | None
    first_column: int  # of this rank's, in the whole vocabulary
    vocab: int
    group: str

    @property
    def columns(self) -> Tensor:
        """The targets as columns of this weight; outside of it on ranks that are not their `owner`."""
        return self.targets - self.first_column

    @property
    def owner(self) -> Tensor:
        """The rank that has each target."""
        return self.targets // max(len(self.weight), 1)


class Statistics(NamedTuple):
    """By loss token, [N] each; maxima and logs of the sums above them in the units of the path."""

    logprobs: Tensor
    entropies: Tensor  # nats; [0] unless asked for
    maximum: Tensor
    log_total: Tensor
    chosen: Tensor  # the target's logit, before the temperature


class Incoming(NamedTuple):
    """Gradients that come in, on the slots of a path's chunks."""

    slots: Slots
    gradients: RowGradients
    entropy: Tensor | None  # [S], where a gradient to it comes in
    at_targets: Tensor  # [N] float64, the whole gradient to the target's logit


def incoming(
    call: Call,
    statistics: Statistics,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    chunk_rows: int,
) -> Incoming:
    """Gradients [N] of logprobs and entropies by slot."""
    runs, count = call.runs, len(call.targets)
    slots = slots_of(runs, len(call.hidden), count, call.hidden.device, chunk_rows)
    gradients = gather_gradients(
        grad_logprobs, grad_entropies, slots, call.targets, call.vocab, runs.order is None
    )
    entropy = None if grad_entropies is None else by_slot(statistics.entropies, slots)
    at_targets = target_gradient(statistics.logprobs, entropy, gradients, slots, call.temperature)
    if call.softcap is not None:
        at_targets = at_targets * (1 - (statistics.chosen.double() / call.softcap) ** 2)
    return Incoming(slots, gradients, entropy, at_targets)
