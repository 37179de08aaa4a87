"""The gradient of logprobs and entropies to logits.

With p the softmax: d logp_t = onehot_t - p, d H = -p · (log p + H).
The part of the targets themselves is made per loss token, in float64; the rest per row.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.row_groups import RowGroups, Slots, by_slot, slots_of
from mmpack.ops.logprobs.softmax import LOWEST
from mmpack.ops.segments import keyed_sum


class SlotGradients(NamedTuple):
    """Incoming gradients by slot. Sums are taken in the order of n, in float64."""

    slots: Slots
    logprob: Tensor  # [S] sum over the row's loss tokens
    entropy: Tensor  # [S]
    live: Tensor  # [S] bool: any of the row's gradients is not 0
    entropies: Tensor | None  # [S] the forward's, nats, where a gradient to them comes in
    at_targets: Tensor  # [N] float64, the whole gradient to the target's logit


class AnyCall(Protocol):
    """What the calls of both ops have."""

    @property
    def targets(self) -> Tensor: ...
    @property
    def temperature(self) -> float | Tensor: ...
    @property
    def groups(self) -> RowGroups: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def vocab(self) -> int: ...


def slot_gradients(
    call: AnyCall, given: Incoming, logprobs: Tensor, entropies: Tensor, chunk: int
) -> SlotGradients:
    """Sum the gradients by row, and by row and target. `logprobs` and `entropies` [N] are the forward's."""
    targets, groups = call.targets.long(), call.groups
    slots = slots_of(groups, call.num_rows, len(targets), targets.device, chunk)
    logprob = given.grad_logprobs.double()
    to_entropies = given.grad_entropies
    entropy = torch.zeros_like(logprob) if to_entropies is None else to_entropies.double()
    live, target = (logprob != 0) | (entropy != 0), logprob
    if groups.order is not None:
        live = keyed_sum(live.double(), slots.of) > 0
        target = keyed_sum(logprob, slots.of * call.vocab + targets)
        logprob, entropy = keyed_sum(logprob, slots.of), keyed_sum(entropy, slots.of)
    by_row = SlotGradients(
        slots,
        by_slot(logprob, slots),
        by_slot(entropy, slots),
        by_slot(live, slots),
        None if to_entropies is None else by_slot(entropies, slots),
        target,
    )
    return by_row._replace(at_targets=_at_targets(by_row, logprobs, call.temperature))


def row_gradient(
    logits: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    given: SlotGradients,
    chunk: slice,
    temperature: float | Tensor,
) -> Tensor:
    """Gradient [C, V] to the logits without the targets' own part; 0 for rows that no gradient reaches.

    `maximum`, `log_total`: [S], of the forward. Overwrites `logits`.
    """
    dtype = logits.dtype
    logprobs = logits.sub_(maximum[chunk, None]).div_(temperature).sub_(log_total[chunk, None])
    along = given.logprob[chunk].to(dtype)[:, None]
    if given.entropies is None:
        grad = logprobs.exp_().mul_(-along / temperature)
    else:
        p = logprobs.clamp_(min=LOWEST).exp()
        from_entropy = given.entropy[chunk].to(dtype)[:, None]
        grad = logprobs.add_(given.entropies[chunk, None]).mul_(from_entropy).add_(along).mul_(p)
        grad.div_(-temperature)
    return grad.masked_fill_(~given.live[chunk, None], 0.0)


def _at_targets(given: SlotGradients, logprobs: Tensor, temperature: float | Tensor) -> Tensor:
    """The whole gradient [N] to each target's logit, from its own in `at_targets`: the sum per row and target.

    Entries of one row and target are equal in bits.
    """
    of, logprobs = given.slots.of, logprobs.double()
    along = given.logprob[of]
    # Where a row has one target this is -expm1(logp) · g, which keeps its digits as p nears 1.
    grad = (given.at_targets - along) - torch.expm1(logprobs) * along
    if given.entropies is not None:
        finite = logprobs.clamp(min=LOWEST)
        grad = grad - finite.exp() * (finite + given.entropies.double()[of]) * given.entropy[of]
    return torch.where(given.live[of], grad / temperature, 0.0)
