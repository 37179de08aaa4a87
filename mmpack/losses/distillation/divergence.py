"""How far the policy is from a teacher, per loss token [N], over the ids that the teacher scored.

The op mmpack::teacher_divergence computes the derivatives with the divergences.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.distillation import TEACHER_DIVERGENCE
from mmpack.losses.distillation.call import Columns, Kind, Options, Tail
from mmpack.losses.samples import check_column
from mmpack.ops.custom_op import by_backend, define_op
from mmpack.ops.inputs import can_look_at, check_tensors
from mmpack.ops.logprobs.arguments import check_list
from mmpack.ops.logprobs.listed import tokens_of
from mmpack.ops.logprobs.support import ScoredSupport
from mmpack.ops.segments import segment_sum

WHAT = "teacher_divergence"
MOST_LOGPROB = 1e-3  # what rounding makes of 0
MOST_MASS = 1.05  # what rounding of logprobs to bfloat16 makes of 1


def teacher_divergence(
    logprobs: Tensor,
    teacher: ScoredSupport,
    kind: Kind = "forward_kl",
    tail: Tail = "bucket",
    *,
    beta: float = 0.5,
    min_logprob: float | None = None,
    max_divergence: float | None = None,
) -> Tensor:
    """The divergence of each loss token, with p the policy's and q the teacher's probabilities of its list.

    - `forward_kl`: KL(q ‖ p), the sum of q · (log q - log p)
    - `reverse_kl`: KL(p ‖ q)
    - `jsd`: beta · KL(q ‖ m) + (1 - beta) · KL(p ‖ m), m = beta · q + (1 - beta) · p (GKD, arXiv 2306.13649 eq. 1)

    A list holds a part of the vocabulary. What is done with the mass beyond it is `tail`:

    - `bucket`: it is one id more, log(1 - sum), at least 1e-7 (TRL with `loss_add_tail`): p and q add up to 1, and the
      divergence is a lower bound of that over the whole vocabulary.
    - `renormalize`: p and q are divided by their sums (TRL without): only ratios within the list count.
    - `ignore`: p and q stay as they are and the rest is left out (verl's `forward_kl_topk`). A sum below 0, where the
      policy has more mass on the list than the teacher, counts as 0 and has no gradient. Not of `reverse_kl`, which
      a policy would lower by leaving the list.

    Args:
        logprobs: [M] float, of the policy, one for each id of the lists, under the softmax over all ids
            (`linear_listed_logprobs`, `listed_logprobs`).
        teacher: N lists with the teacher's logprobs, which get no gradient: its likeliest ids, the policy's own, or
            any others that it was asked for. An empty list is no word: its divergence is 0.
        beta: of `jsd`, between 0 and 1; near 0 and 1 it is a multiple of the forward and the reverse KL.
        min_logprob: logprobs below count as this, the policy's without a gradient (verl's `log_prob_min_clamp`).
        max_divergence: divergences are cut to ± this, without a gradient (verl's `loss_max_clamp`).

    Returns [N] float64 in nats. Sums are in float64, in an order that depends on the list alone.
    Raises ArgumentError for shapes that don't fit, unknown names and numbers out of their range, and on the CPU for
    offsets that don't fit the ids, an id that a list has twice, and logprobs that are no logs of probabilities.

    Example: the teacher puts 0.8 and 0.1 where the policy has 0.5 and 0.25.
        >>> import torch
        >>> import mmpack as mp
        >>> offsets, ids = torch.tensor([0, 2]), torch.tensor([3, 7])
        >>> teacher = mp.ops.ScoredSupport(offsets, ids, torch.tensor([0.8, 0.1]).log())
        >>> mp.losses.teacher_divergence(torch.tensor([0.5, 0.25]).log(), teacher)
        tensor([0.1927], dtype=torch.float64)
    """
    check_teacher(WHAT, "teacher", teacher)
    check_policy(WHAT, "logprobs", logprobs, teacher)
    values, _ = measured(
        WHAT, logprobs, teacher, check_options(WHAT, kind, tail, beta, min_logprob, max_divergence)
    )
    return cut(values, kind, tail, max_divergence)


def measured(
    what: str, logprobs: Tensor, teacher: ScoredSupport, options: Options
) -> tuple[Tensor, Tensor]:
    """Divergences [N], not cut, and masses [2, N] (policy, teacher) of checked arguments, float64."""
    columns = Columns(logprobs, teacher.logprobs.detach(), teacher.offsets.long().contiguous())
    values, masses = DivergenceFunction.apply(*columns, options)
    return values, masses


def cut(values: Tensor, kind: Kind, tail: Tail, max_divergence: float | None) -> Tensor:
    """Divergences within their bounds."""
    if kind == "forward_kl" and tail == "ignore":
        values = values.clamp(min=0.0)
    return values if max_divergence is None else values.clamp(-max_divergence, max_divergence)


def check_options(
    what: str, kind: Any, tail: Any, beta: Any, min_logprob: Any, max_divergence: Any
) -> Options:
    """The options of a call. Raises ArgumentError for unknown names and numbers out of their range."""
    check_name(what, "kind", kind, get_args(Kind))
    check_name(what, "tail", tail, get_args(Tail))
    if kind == "reverse_kl" and tail == "ignore":
        raise ArgumentError(
            f"{what}: with kind='reverse_kl' and tail='ignore' a policy lowers the loss by leaving the lists. "
            "Fix: pass tail='bucket' or 'renormalize'"
        )
    check_number(what, "beta", beta, above=0, most=1)
    if beta == 1:
        raise ArgumentError(
            f"{what}: beta is {beta!r}, expected a number between 0 and 1. Fix: pass kind='reverse_kl'"
        )
    if min_logprob is not None:
        check_number(what, "min_logprob", min_logprob, most=0, finite=True)
    if max_divergence is not None:
        check_number(what, "max_divergence", max_divergence, above=0)
    least = -math.inf if min_logprob is None else float(min_logprob)
    return Options(kind, tail, float(beta), least)


def check_teacher(what: str, where: str, teacher: Any) -> None:
    """Raise ArgumentError unless `teacher` is a ScoredSupport of N lists, with the log of a probability per id."""
    if not isinstance(teacher, ScoredSupport):
        raise ArgumentError(
            f"{what}: {where} is {kind_of(teacher)}, expected a ScoredSupport. "
            f"Fix: pass batch.teachers[name], or mp.ops.ScoredSupport(offsets, ids, logprobs)"
        )
    check_list(what, where, teacher)
    given, name = teacher.logprobs, f"{where}.logprobs"
    check_of_ids(what, name, given, teacher)
    wrong = ~(given <= MOST_LOGPROB)
    if can_look_at(given) and bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"{what}: {name}[{at}] is {float(given[at])}, expected the log of a probability. "
            f"Fix: pass natural logs under the teacher's softmax, not logits or probabilities"
        )
    if can_look_at(given) and can_look_at(teacher.ids):
        _check_distributions(what, where, teacher)


def check_policy(what: str, name: str, logprobs: Any, teacher: ScoredSupport) -> None:
    """Raise ArgumentError unless the policy's `logprobs` [M] fit the lists; on the CPU, for logits. NaN may be."""
    check_of_ids(what, name, logprobs, teacher)
    if can_look_at(logprobs) and bool((logprobs > MOST_LOGPROB).any()):
        at = int((logprobs > MOST_LOGPROB).nonzero()[0])
        raise ArgumentError(
            f"{what}: {name}[{at}] is {float(logprobs[at].detach())}, expected the log of a probability. "
            f"Fix: pass linear_listed_logprobs(…).lists, not logits or probabilities"
        )


def _check_distributions(what: str, where: str, teacher: ScoredSupport) -> None:
    """No list has an id twice, or more than all of the probability."""
    ids, tokens = teacher.ids.long(), tokens_of(teacher)
    if bool(((ids[1:] <= ids[:-1]) & (tokens[1:] == tokens[:-1])).any()):
        order = torch.argsort(ids, stable=True)
        order = order[torch.argsort(tokens[order], stable=True)]
        ids, in_order = ids[order], tokens[order]
        twice = (ids[1:] == ids[:-1]) & (in_order[1:] == in_order[:-1])
        if bool(twice.any()):
            at = int(twice.nonzero()[0])
            raise ArgumentError(
                f"{what}: the list of loss token {int(in_order[at])} in {where} has id {int(ids[at])} twice. "
                f"Fix: keep each id of a list once"
            )
    mass = segment_sum(teacher.logprobs.detach().double().exp(), teacher.offsets)
    if bool((mass > MOST_MASS).any()):
        at = int((mass > MOST_MASS).nonzero()[0])
        raise ArgumentError(
            f"{what}: the list of loss token {at} in {where} holds {float(mass[at]):.3g} of probability, more than 1. "
            "Fix: pass natural logs under one softmax of the teacher"
        )


def check_of_ids(what: str, name: str, logprobs: Any, teacher: ScoredSupport) -> None:
    """Raise ArgumentError unless `logprobs` [M] are floats, one for each id of the lists."""
    check_tensors(what, (), **{"the lists' ids": teacher.ids, name: logprobs})
    fix = "score the ids of this teacher, in their order"
    check_column(what, name, logprobs, len(teacher.ids), "floats", teacher.ids, fix)


class DivergenceFunction(torch.autograd.Function):
    """(divergences [N], masses [2, N]) from the Columns, one by one, and the Options; a gradient to the logprobs."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = call
        values, masses, slopes = divergence_op(*tensors, *options)
        columns = Columns(*tensors)
        ctx.save_for_backward(slopes, columns.offsets)
        ctx.dtype = columns.logprobs.dtype
        ctx.mark_non_differentiable(masses)
        ctx.set_materialize_grads(False)
        return values, masses

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ArgumentError(
                "teacher_divergence: create_graph=True asks for a second derivative, which it does not have. "
                "Fix: leave create_graph out"
            )
        if grad is None:
            return None, None, None, None
        slopes, offsets = ctx.saved_tensors
        tokens = Columns(slopes, slopes, offsets).tokens
        # A token without a gradient passes none on, whatever its slopes are.
        up = grad[tokens]
        product = torch.where(up == 0, 0.0, up * slopes)
        return product.to(ctx.dtype), None, None, None


def _fake(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, count = columns.logprobs, columns.offsets.shape[0] - 1
    return (
        logprobs.new_empty(count, dtype=torch.float64),
        logprobs.new_empty((2, count), dtype=torch.float64),
        torch.empty_like(logprobs, dtype=torch.promote_types(logprobs.dtype, torch.float32)),
    )


# Returns the divergences [N] and masses [2, N], float64, and the derivatives [M] of each token's own divergence:
# float32, or float64 where logprobs are.
divergence_op = define_op("teacher_divergence", by_backend(TEACHER_DIVERGENCE, "divergence"), _fake)
