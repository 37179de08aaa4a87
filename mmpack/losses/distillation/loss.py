"""The loss of a batch from its teachers: per loss token [N] the divergences from all that say something of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.losses.aggregate import Aggregation, Total, aggregate
from mmpack.losses.distillation.call import Kind, Tail, weighed, weights_of
from mmpack.losses.distillation.divergence import (
    check_options,
    check_policy,
    check_teacher,
    cut,
    measured,
)
from mmpack.losses.samples import check_columns
from mmpack.ops.logprobs.support import ScoredSupport

WHAT = "distillation_loss"


@dataclass(frozen=True)
class DistillationLoss:
    """A loss to add to another, or to call `.backward()` on, and what to log about it."""

    loss: Tensor  # scalar float32
    # Scalars float32, detached, by `teacher/what`: means over the loss tokens that a teacher says something of.
    metrics: dict[str, Tensor]


def distillation_loss(
    logprobs: Mapping[str, Tensor],
    teachers: Mapping[str, ScoredSupport],
    cu_loss: Tensor,
    kind: Kind = "forward_kl",
    tail: Tail = "bucket",
    aggregation: Aggregation = "token_mean",
    total_tokens: Total | None = None,
    total_samples: Total | None = None,
    scale: float = 1.0,
    *,
    max_tokens: int | None = None,
    beta: float = 0.5,
    weights: Mapping[str, float] | None = None,
    token_weights: Tensor | None = None,
    min_logprob: float | None = None,
    max_divergence: float | None = None,
) -> DistillationLoss:
    """scale · aggregate(token_weights · sum over the teachers of weight · divergence).

    Args:
        logprobs: by teacher, [M] of the policy for the teacher's ids, `linear_listed_logprobs(…).lists`.
        teachers: N lists each, `PackedBatch.teachers`. A loss token whose list is empty has nothing of this teacher,
            and counts in the aggregation all the same: teachers of several domains share one batch.
        cu_loss: [B+1] int32, `PackedBatch.cu_loss`.
        kind, tail, beta, min_logprob, max_divergence: see `teacher_divergence`; each divergence is cut by itself.
        aggregation, total_tokens, total_samples, max_tokens: see `aggregate`. With those of `policy_loss` the mixture
            is `policy.loss + distillation.loss`.
        scale: undoes gradient averaging, e.g. the number of data-parallel ranks.
        weights: by teacher, for all of them; more names than teachers are fine, a batch may lack some. None: 1 each.
        token_weights: [N], constants: a mask, or ratios of importance that are already cut.

    What has weight 0 is left out, even where it is infinite.

    Gradients reach the logprobs. Without teachers the loss is a zero that is attached to nothing.

    Metrics, for each teacher: `NAME/tokens` (a count), `NAME/divergence` (before max_divergence), `NAME/policy_mass`
    and `NAME/teacher_mass` (what the lists hold of the probability); 0 where it says nothing.

    Raises ArgumentError as `teacher_divergence` and `aggregate` do, and where names of teachers, logprobs and weights
    don't fit.

    Example: the teacher says nothing of the second token.
        >>> import torch
        >>> import mmpack as mp
        >>> teacher = mp.ops.ScoredSupport(torch.tensor([0, 1, 1]), torch.tensor([3]), torch.tensor([-0.5]))
        >>> logprobs = torch.tensor([-1.0], requires_grad=True)
        >>> cu_loss = torch.tensor([0, 2], dtype=torch.int32)
        >>> out = mp.distillation_loss({"32B": logprobs}, {"32B": teacher}, cu_loss, tail="ignore")
        >>> out.loss.backward()
        >>> out.loss.detach(), logprobs.grad
        (tensor(0.1516), tensor([-0.3033]))
    """
    options = check_options(WHAT, kind, tail, beta, min_logprob, max_divergence)
    check_number(WHAT, "scale", scale, least=0)
    _check_names(logprobs, teachers)
    factors = weights_of(WHAT, teachers, weights)
    terms: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    for name, teacher in teachers.items():
        given = logprobs[name]
        check_teacher(WHAT, f"teachers[{name!r:.40}]", teacher)
        check_policy(WHAT, f"logprobs[{name!r:.40}]", given, teacher)
        values, masses = measured(WHAT, given, teacher, options)
        check_columns(WHAT, cu_loss, {f"the lists of {name!r:.40}": values})
        metrics |= _metrics(name, teacher, values, masses)
        own = weighed(cut(values, kind, tail, max_divergence), factors[name])
        terms = own if terms is None else terms + own
    check_columns(WHAT, cu_loss, {"token_weights": token_weights}, optional=("token_weights",))
    if terms is None:
        return DistillationLoss(torch.zeros((), device=cu_loss.device), metrics)
    if token_weights is not None:
        check_columns(WHAT, cu_loss, {"teachers": terms, "token_weights": token_weights})
        terms = weighed(terms, token_weights.detach().double())
    total = aggregate(
        terms,
        cu_loss,
        aggregation,
        total_tokens=total_tokens,
        total_samples=total_samples,
        max_tokens=max_tokens,
    )
    return DistillationLoss((scale * total).float(), metrics)


def _check_names(logprobs: Any, teachers: Any) -> None:
    for name, given in {"logprobs": logprobs, "teachers": teachers}.items():
        if not isinstance(given, Mapping):
            raise ArgumentError(
                f"{WHAT}: {name} is {kind_of(given)}, expected a mapping by teacher. "
                f"Fix: pass {{'teacher': …}}, as in batch.teachers"
            )
    if set(logprobs) != set(teachers):
        raise ArgumentError(
            f"{WHAT}: logprobs are of {_names(logprobs)}, but the teachers are {_names(teachers)}. "
            f"Fix: pass linear_listed_logprobs(…).lists of these teachers"
        )


def _names(names: Any) -> str:
    return ", ".join(f"{name!r:.40}" for name in sorted(names, key=str)[:5]) or "none"


def _metrics(
    name: str, teacher: ScoredSupport, values: Tensor, masses: Tensor
) -> dict[str, Tensor]:
    taught = teacher.offsets.diff() > 0
    count = taught.sum().clamp(min=1)
    columns = {"divergence": values.detach(), "policy_mass": masses[0], "teacher_mass": masses[1]}
    means = {
        f"{name}/{what}": (torch.where(taught, column, 0.0).sum() / count).float()
        for what, column in columns.items()
    }
    return {f"{name}/tokens": taught.sum().float(), **means}
