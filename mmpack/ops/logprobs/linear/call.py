"""One call of linear_selected_logprobs: its inputs and options, and what its forward leaves for the backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.gradients import SlotGradients, slot_gradients
from mmpack.ops.logprobs.row_groups import RowGroups


class Head(NamedTuple):
    """What logits are made of: hidden states, this rank's part of the output weight, and where that part lies."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V / ranks, H]
    bias: Tensor | None  # [V / ranks]
    softcap: float | None
    first_column: int  # of this rank, in the whole vocabulary
    vocab: int  # V
    group: str  # name of the process group; "": one rank

    @property
    def shard(self) -> tuple[int, int, str]:
        return self[4:]


class Call(NamedTuple):
    """Tensors first, then options: what the custom ops take, in this order.

    Weight and bias are this rank's part of the vocabulary; targets count in the whole vocabulary.
    """

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V / ranks, H]
    bias: Tensor | None  # [V / ranks]
    targets: Tensor  # [N] int64 in [0, V)
    # The three fields of RowGroups.
    rows: Tensor | None
    order: Tensor | None
    offsets: Tensor | None
    temperature: float
    softcap: float | None
    entropy: bool
    store: bool  # keep the probabilities for the backward
    budget: int  # bytes, see memory_budget; 0: the default
    first_column: int  # of this rank, in the whole vocabulary
    vocab: int  # V
    group: str  # name of the process group; "": one rank

    @property
    def head(self) -> Head:
        return Head(*self[:3], self.softcap, *self[-3:])

    @property
    def groups(self) -> RowGroups:
        return RowGroups(self.rows, self.order, self.offsets)

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def columns(self) -> Tensor:
        """The targets as columns of this weight; out of its range on ranks that are not their `owner`."""
        return self.targets - self.first_column

    @property
    def owner(self) -> Tensor:
        """The rank that has each target."""
        return self.targets // max(len(self.weight), 1)


class Statistics(NamedTuple):
    """Per loss token, [N] each, maxima and logs in the units of the path; then what `store` keeps, else [0, 0]."""

    logprobs: Tensor
    entropies: Tensor  # nats; [0] unless asked for
    maximum: Tensor  # of the row
    log_total: Tensor  # log of the sum of exp above the maximum
    chosen: Tensor  # the target's logit, before the temperature
    stored: Tensor  # [S, columns of whole tiles] probabilities relative to their tile's maximum
    tile_maximum: Tensor  # [tiles, S] float32


class Gradients(NamedTuple):
    """Gradients of the inputs' shapes; None, or [0] where an op returns them, if not asked for."""

    hidden: Tensor | None  # summed over the ranks
    weight: Tensor | None
    bias: Tensor | None


def gradients_of(call: Call, statistics: Statistics, given: Incoming, chunk: int) -> SlotGradients:
    """As `slot_gradients`, with the slope of softcap at the targets."""
    found = slot_gradients(call, given, statistics.logprobs, statistics.entropies, chunk)
    if call.softcap is None:
        return found
    slope = 1 - (statistics.chosen.double() / call.softcap) ** 2
    return found._replace(at_targets=found.at_targets * slope)
