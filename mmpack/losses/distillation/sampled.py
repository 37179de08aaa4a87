"""What teachers say of the sampled tokens [N] alone: as a reference, and as advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.losses.distillation.call import weighed, weights_of
from mmpack.losses.distillation.divergence import check_teacher
from mmpack.losses.samples import check_column
from mmpack.ops.inputs import can_look_at, check_index, check_tensors
from mmpack.ops.logprobs.listed import tokens_of
from mmpack.ops.logprobs.support import ScoredSupport
from mmpack.ops.segments import segment_sum

MOST_IDS = 1 << 31  # of a vocabulary


def teacher_logprobs(
    teacher: ScoredSupport, targets: Tensor, otherwise: Tensor | None = None
) -> Tensor:
    """The teacher's logprob of each sampled token, [N] float32, detached.

    Args:
        teacher: N lists; those that aren't empty hold the target (vLLM's `prompt_logprobs` do).
        targets: [N] int64, `PackedBatch.loss_targets`.
        otherwise: [N], taken where a list is empty; None: NaN there. With the policy's own logprobs the result is what
            `policy_loss` takes as `ref_logprobs`, with no KL where the teacher says nothing.

    Raises ArgumentError for shapes that don't fit, and on the CPU for a list that lacks its target. On a GPU, where
    nothing is looked at, that is NaN.

    Example: it says nothing of the second token.
        >>> import torch
        >>> import mmpack as mp
        >>> scores = torch.tensor([-0.25, -1.5])
        >>> teacher = mp.ops.ScoredSupport(torch.tensor([0, 2, 2]), torch.tensor([3, 7]), scores)
        >>> mp.losses.teacher_logprobs(teacher, torch.tensor([7, 5]), otherwise=torch.tensor([-2.0, -3.0]))
        tensor([-1.5000, -3.0000])
    """
    what = "teacher_logprobs"
    check_tensors(what, ("otherwise",), targets=targets, otherwise=otherwise)
    check_index(what, "targets", targets, MOST_IDS)
    _check_teacher(what, "teacher", teacher, targets)
    if otherwise is not None:
        check_column(what, "otherwise", otherwise, len(targets), "floats", targets)
    found, said = _of_targets(what, "teacher", teacher, targets)
    rest = torch.nan if otherwise is None else otherwise.detach().float()
    return torch.where(said, found, rest)


def teacher_advantages(
    logprobs: Tensor,
    targets: Tensor,
    teachers: Mapping[str, ScoredSupport],
    *,
    weights: Mapping[str, float] | None = None,
    max_advantage: float | None = None,
) -> Tensor:
    """Sum over the teachers of weight · (teacher's logprob - policy's) of each sampled token, [N] float32, detached.

    The reverse KL of the sampled token as a reward, negated, without a baseline and without credit to earlier tokens:
    on-policy distillation of Thinking Machines (thinkingmachines.ai/blog/on-policy-distillation) and of verl with
    `loss_mode="k1"` and `use_policy_gradient`. `policy_loss(logprobs, these, cu_loss, …, per="token")` is the loss;
    added to the advantages of a task they make a mixture. 0 where a teacher says nothing.

    Args:
        logprobs: [N], of the policy that is compared: the one in training, or the one that sampled. Over all ids, as
            the teacher's are: of a batch with kept ids those of `packed_logprobs(…, kept_ids=False)`.
        targets: [N] int64, `PackedBatch.loss_targets`.
        teachers: N lists each; those that aren't empty hold the target.
        weights: by teacher, for all of them; None: 1 each.
        max_advantage: differences are cut to ± this (verl's `loss_max_clamp`).

    Raises ArgumentError as `teacher_logprobs` does.

    Example: the teacher finds the first token likelier than the policy does.
        >>> import torch
        >>> import mmpack as mp
        >>> teacher = mp.ops.ScoredSupport(torch.tensor([0, 1, 1]), torch.tensor([3]), torch.tensor([-0.5]))
        >>> mp.losses.teacher_advantages(torch.tensor([-1.5, -1.0]), torch.tensor([3, 4]), {"32B": teacher})
        tensor([1., 0.])
    """
    what = "teacher_advantages"
    check_tensors(what, (), logprobs=logprobs, targets=targets)
    check_index(what, "targets", targets, MOST_IDS)
    check_column(what, "logprobs", logprobs, len(targets), "floats", targets)
    if not isinstance(teachers, Mapping):
        raise ArgumentError(
            f"{what}: teachers is {kind_of(teachers)}, expected a mapping by teacher. Fix: pass batch.teachers"
        )
    factors = weights_of(what, teachers, weights)
    if max_advantage is not None:
        check_number(what, "max_advantage", max_advantage, above=0)
    total = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    for name, teacher in teachers.items():
        where = f"teachers[{name!r:.40}]"
        _check_teacher(what, where, teacher, targets)
        found, said = _of_targets(what, where, teacher, targets)
        gap = found.double() - logprobs.detach().double()
        if max_advantage is not None:
            gap = gap.clamp(-max_advantage, max_advantage)
        total += weighed(torch.where(said, gap, 0.0), factors[name])
    return total.float()


def _check_teacher(what: str, where: str, teacher: Any, targets: Tensor) -> None:
    check_teacher(what, where, teacher)
    check_tensors(what, (), targets=targets, **{f"{where}.ids": teacher.ids})
    if len(teacher) != len(targets):
        raise ArgumentError(
            f"{what}: {where} has {len(teacher)} lists for {len(targets)} targets. "
            f"Fix: pass one list per loss token, an empty one where the teacher scored nothing"
        )


def _of_targets(
    what: str, where: str, teacher: ScoredSupport, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The logprobs [N] float32 of the targets, NaN where a list lacks its own; and whether a list is not empty."""
    offsets = teacher.offsets.clamp(0, len(teacher.ids))
    hit = teacher.ids == targets[tokens_of(teacher)]
    found = segment_sum(torch.where(hit, teacher.logprobs.detach().double(), 0.0), offsets)
    held, said = segment_sum(hit.double(), offsets) == 1, offsets.diff() > 0
    lost = said & ~held
    if can_look_at(lost) and bool(lost.any()):
        at = int(lost.nonzero()[0])
        raise ArgumentError(
            f"{what}: the list of loss token {at} in {where} lacks its target, id {int(targets[at])}. "
            f"Fix: ask the teacher for the logprob of the sampled token too, or leave the list empty"
        )
    return torch.where(held, found, torch.nan).float(), said
