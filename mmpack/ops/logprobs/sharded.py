"""Logprobs from logits [T, V / ranks] of a vocabulary that is split over ranks, as Megatron's output layer leaves them.

Each rank runs the op of selected.py on its columns. Then [N] statistics travel, never logits: maximum, log of the sum,
entropy and the target's logit are combined in float64, in the order of the ranks, so every rank has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.inputs import can_look_at
from mmpack.ops.logprobs import selected
from mmpack.ops.logprobs.arguments import Tokens, check_support
from mmpack.ops.logprobs.autograd import Incoming, incoming
from mmpack.ops.logprobs.call import Call, Statistics, runtime_scalar
from mmpack.ops.logprobs.linear.shards import gathered
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.logprobs.lists.call import Lists, lists_of
from mmpack.ops.logprobs.lists.call import Statistics as ListStatistics
from mmpack.ops.logprobs.row_groups import make_row_groups
from mmpack.ops.logprobs.softmax import LOWEST
from mmpack.ops.logprobs.support import Support

NAME = "sharded_selected_logprobs"
TENSORS, ROWS = Call._fields.index("entropy"), Call._fields.index("rows")


def sharded_selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor,
    group: ProcessGroup,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    support: Support | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_logprobs` of logits whose columns are split over the ranks of `group`, in order.

    Args:
        logits: [T, V / ranks], this rank's columns; all else is the same on each rank.
        targets: [N] int64 ids of the whole vocabulary.
        rows: [N] row that predicts each target, each row once.
        support: the ids that the sampler left, of the whole vocabulary. The softmax and the entropy are over these.

    Returns [N] float32 (float64 for float64 logits), or (logprobs, entropy in nats), the same on every rank. The
    gradient is that of a loss that each rank has: none of it is summed over the ranks.

    Raises: ArgumentError as `selected_logprobs` does; on a GPU NaN, as there.
    """
    tokens = Tokens(targets, rows, None, None, temperature, entropy)
    tokens.check(NAME, logits=logits)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shard = logits.shape[1]
    tokens.check_values(NAME, len(logits), ranks * shard)
    if can_look_at(rows) and len(rows.unique()) != len(rows):
        raise ArgumentError(f"{NAME}: rows repeat. Fix: read each row once")
    first = rank * shard
    if support is not None:
        check_support(NAME, support, targets, ranks * shard)
        logprobs, entropies = _OverLists.apply(
            logits, *lists_of(support, targets), tokens.scale, rows, group, bool(entropy), first
        )
    else:
        logprobs, entropies = _Sharded.apply(
            logits, targets.long(), rows, group, temperature, entropy, first
        )
    return (logprobs, entropies) if entropy else logprobs


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        rows: Tensor,
        group: ProcessGroup,
        temperature: float,
        entropy: bool,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        shard = logits.shape[1]
        here = (targets >= first) & (targets < first + shard)
        own = torch.where(here, targets - first, 0)
        distinct = torch.arange(len(rows), device=rows.device, dtype=rows.dtype)
        groups = make_row_groups(len(logits), rows, rows, distinct)
        call = Call(
            logits, own, *groups, runtime_scalar(temperature, logits.device), entropy, "dense"
        )
        part = selected.selected_op(*call)
        at = rows.long()
        chosen = torch.where(here, logits[at, own].double(), 0.0)
        whole = _combine(Statistics(*part), chosen, group, temperature, entropy)
        ctx.save_for_backward(*call[:TENSORS], here, logits[at, 0].double(), *whole)
        ctx.options = call[TENSORS:]
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropies = whole.logprobs.to(dtype), whole.entropies.to(dtype)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call = Call(*saved[:TENSORS], *ctx.options)
        here, at_zero, *rest = saved[TENSORS:]
        whole = Statistics(*rest)
        given = incoming(whole.logprobs, grad_logprobs, grad_entropies, call.entropy)
        dtype = torch.promote_types(call.logits.dtype, torch.float32)
        to_entropies = given.grad_entropies
        given = Incoming(
            given.grad_logprobs.to(dtype), None if to_entropies is None else to_entropies.to(dtype)
        )
        own = Statistics(*(x.to(dtype) for x in whole))
        (grad,) = selected.selected_gradient(given, call, own, None)
        # A target that another rank has stood at column 0, where the op wrote the gradient to a target.
        rows = saved[ROWS].long()
        other = _to_others(at_zero, given, whole, call.temperature).to(grad.dtype)
        grad[rows, 0] = torch.where(here, grad[rows, 0], other)
        return grad, None, None, None, None, None, None


def _combine(
    part: Statistics, chosen: Tensor, group: ProcessGroup, temperature: float, entropy: bool
) -> Statistics:
    """Statistics of the whole rows, from those of this rank's columns and the target's logit where it has it."""
    own = [part.maximum.double(), part.log_total.double(), chosen]
    if entropy:
        own.append(part.entropies.double())
    parts = gathered(torch.stack(own)[None], group)  # [ranks, 3 or 4, N]
    maximum = parts[:, 0].amax(0)
    # A rank all of whose columns are masked (-inf) adds nothing.
    log_totals = torch.where(
        parts[:, 0] == -torch.inf, -torch.inf, (parts[:, 0] - maximum) / temperature + parts[:, 1]
    )
    log_total = torch.logsumexp(log_totals, 0)
    logprobs = (parts[:, 2].sum(0) - maximum) / temperature - log_total
    entropies = logprobs.new_zeros(0)
    if entropy:
        # the rank's mean of (logit - maximum) / temperature is its log total less its entropy
        share = (log_totals - log_total).exp()
        means = torch.where(share == 0, 0.0, share * (log_totals - parts[:, 3]))
        entropies = log_total - means.sum(0)
    return Statistics(logprobs, entropies, maximum, log_total)


def _to_others(at: Tensor, given: Incoming, whole: Statistics, temperature: Tensor) -> Tensor:
    """The gradient [N] to logits `at` [N] that are no targets, float64."""
    logprob = (at - whole.maximum) / temperature - whole.log_total
    slope = given.grad_logprobs.double()
    if given.grad_entropies is not None:
        finite = logprob.clamp(min=LOWEST)
        slope = slope + given.grad_entropies.double() * (finite + whole.entropies)
    return -logprob.exp() * slope / temperature


class _OverLists(torch.autograd.Function):
    """Over the lists: their logits travel, M values, each from the rank that has it. The rest is the op's own."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        starts: Tensor,
        ids: Tensor,
        targets: Tensor,
        temperature: Tensor,
        rows: Tensor,
        group: ProcessGroup,
        entropy: bool,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        lists = Lists(starts, ids, targets, temperature)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        at, columns, shard = rows.long()[lists.tokens], ids.long() - first, logits.shape[1]
        here = (columns >= 0) & (columns < shard)
        columns = torch.where(here, columns, 0)
        own = torch.where(here, logits[at, columns].to(dtype), 0.0)
        known = (ids >= 0) & (ids < shard * dist.get_world_size(group))
        found = torch.where(known, gathered(own[None], group).sum(0), torch.nan)
        ctx.path = implementation(SUPPORT_LOGPROBS, logits.device, logits.dtype)
        made = ctx.path.statistics(lists, found, entropy)
        ctx.save_for_backward(*lists, *made, at, columns, here)
        ctx.shape, ctx.dtype, ctx.entropy = logits.shape, logits.dtype, entropy
        ctx.set_materialize_grads(False)
        entropies = made.entropies.to(made.logprobs.dtype)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return made.logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved, cut = ctx.saved_tensors, len(Lists._fields)
        lists, made = Lists(*saved[:cut]), ListStatistics(*saved[cut:-3])
        at, columns, here = saved[-3:]
        given = incoming(made.logprobs, grad_logprobs, grad_entropies, ctx.entropy)
        slopes = ctx.path.slopes(lists, given, made, None)
        # An id is once in a list and a row has one list: each element is written once. Those of other ranks go to a
        # column more, which is dropped.
        out = slopes.new_zeros((ctx.shape[0], ctx.shape[1] + 1), dtype=ctx.dtype)
        columns = torch.where(here, columns, ctx.shape[1])
        out.index_put_((at, columns), slopes.to(ctx.dtype))
        return out[:, :-1], *(None,) * 8
