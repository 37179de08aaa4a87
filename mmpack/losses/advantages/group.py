"""Advantages [B] from rewards [B], one per sample, compared within groups (the samples of one prompt)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import (
    ArgumentError,
    GroupWarning,
    check_name,
    check_number,
    check_whole,
    kind_of,
)
from mmpack.losses.advantages import GROUP_ADVANTAGES
from mmpack.losses.advantages.torch import leave_one_out, pass_at_k, scaled, spread, standardised
from mmpack.losses.samples import check_column, check_finite
from mmpack.ops.custom_op import by_backend, define_op
from mmpack.ops.inputs import can_look_at, check_are_tensors

AdvantageKind = Literal[
    "grpo", "rloo", "loo_std", "dr_grpo", "lite_ppo", "reinforce_pp", "gdpo", "pass_at_k"
]
# those of them that see a group's rewards only, and so take turns or single scores as well
WithinGroup = Literal["grpo", "dr_grpo", "rloo", "loo_std"]
WHAT = "group_advantages"
OVER_THE_BATCH = ("reinforce_pp", "gdpo")  # centred and scaled over the batch at last


def group_advantages(
    rewards: Tensor | Mapping[str, Tensor],
    group_index: Tensor,
    kind: AdvantageKind = "grpo",
    eps: float = 1e-6,
    *,
    num_tokens: Tensor | None = None,
    unit_index: Tensor | None = None,
    weights: Mapping[str, float] | None = None,
    k: int | None = None,
    check: bool = True,
) -> Tensor:
    """Advantages [B] float32 over the whole batch, before it is planned into micro-batches and ranks.

    With r a reward, mean and std of its group, n the group's size (std with n - 1):

    - `grpo`: (r - mean) / (std + eps) (arXiv 2402.03300 section 4.1.2)
    - `dr_grpo`: r - mean (arXiv 2503.20783)
    - `rloo`: r - the mean of the others, = (r - mean) · n / (n - 1) (arXiv 2402.14740)
    - `loo_std`: (r - the mean of the others) / (their std + eps), as NeMo-RL's leave-one-out baseline: neither depends
      on the sample. Where the others are equal, or there is only one, the difference stays as it is.
    - `lite_ppo`: (r - mean) / (std of the batch's rewards + eps) (arXiv 2508.08221)
    - `reinforce_pp`: a = r - mean, then (a - batch mean of a) / (batch std of a + eps) (REINFORCE++ with baseline,
      arXiv 2501.03262 section 3.3). In a group of one a = r, as in its form for one sample per prompt. The batch's mean
      and std are over samples, as in the paper; with `num_tokens` over loss tokens, as in verl, so that long samples
      count for more.
    - `gdpo`: rewards are a dict of name to [B]; a = the sum over names of weight · (r - mean) / (std + eps), then
      centred and scaled over the batch as in `reinforce_pp` (GDPO, arXiv 2601.05242).
    - `pass_at_k`: what a sample adds to the best of k: (mean of the best over the groups of k that hold it - mean over
      all groups of k) / (std over all + eps), exactly (arXiv 2508.10751); 0 in a group of k or fewer. Rewards of 0
      and 1 make it pass@k, others max@k.

    A std of 0, or of a single value, gives the advantage 0. A group of one gives 0 for every kind but
    `reinforce_pp`: it has nothing to be compared with (TRL does so too; verl's rloo passes the bare reward on).

    Args: rewards: [B] float. group_index: [B] int, any numbers in any order. eps: TRL takes 1e-4, verl 1e-6.
    num_tokens: [B] int, the loss tokens of each sample (`Sample.num_loss_tokens`), for `reinforce_pp` and `gdpo`.
    unit_index: [B] int; samples with one number count once, as one member of their group: the per-turn samples of a
    trajectory (`mp.losses.turns_of(samples).sample_trajectory`), which have one reward. None: every sample counts.
    weights: name of a reward to its factor, for `gdpo`; None: 1 each. k: for `pass_at_k`.
    check: read the values, which waits for a GPU once per batch. A NaN or infinite reward is an error. If all groups
    have one sample (no `group_id`) and every advantage is 0 for that, it is a UserWarning. False reads nothing and
    does not wait, as a CUDA graph needs it; while torch.compile traces, nothing is read either. With `unit_index` on
    a GPU the number of units is read all the same.
    Sums are float64 and in the order of the batch, so all of a group get the same mean and std. Of float64 rewards the
    first 32 bits count, so that equal ones have a std of 0. One launch on a GPU, but for `loo_std`, `gdpo` and
    `pass_at_k`. For groups that are split over ranks: `mp.losses.gather_rewards`.
    Raises ArgumentError for shapes, dtypes and devices that don't fit, an eps below 0, an unknown kind, and rewards as
    said.

    Example: two groups of two samples.
        >>> import torch
        >>> import mmpack as mp
        >>> rewards, groups = torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
        >>> mp.group_advantages(rewards, groups)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    check_name(WHAT, "kind", kind, get_args(AdvantageKind))
    check_number(WHAT, "eps", eps, least=0)
    _check_options(rewards, kind, weights, k, num_tokens)
    columns = dict(rewards) if isinstance(rewards, Mapping) else {"": rewards}
    named = {f"rewards[{n!r}]" if n else "rewards": column for n, column in columns.items()}
    check_are_tensors(WHAT, ("num_tokens", "unit_index"), group_index=group_index, **named)
    size, fix = group_index.numel(), "pass one reward per sample, and the number of its group"
    check_column(WHAT, "group_index", group_index, size, "integers", group_index, fix)
    reading = check and not torch.compiler.is_compiling()
    for name, column in named.items():
        check_column(WHAT, name, column, size, "floats", group_index, fix)
        if reading:
            check_finite(WHAT, name, column)
    if num_tokens is not None:
        fix = "pass the loss tokens of each sample"
        check_column(WHAT, "num_tokens", num_tokens, size, "integers", group_index, fix)
        if can_look_at(num_tokens) and bool((num_tokens < 0).any()):
            raise ArgumentError(f"{WHAT}: num_tokens holds {int(num_tokens.min())}. Fix: {fix}")
    inverse = None
    if unit_index is not None:
        near = group_index.cpu() if unit_index.device.type == "cpu" else group_index
        fix = "pass the number of each sample's trajectory"
        check_column(WHAT, "unit_index", unit_index, size, "integers", near, fix)
        first, inverse = (x.to(group_index.device) for x in _first_and_inverse(unit_index))
        if reading:
            _check_alike(first, inverse, group_index=group_index, **named)
        columns = {name: column[first] for name, column in columns.items()}
        group_index = group_index[first]
        if num_tokens is not None:
            num_tokens = num_tokens.new_zeros(len(first)).index_add(0, inverse, num_tokens)
    if reading:
        _warn_alone(group_index, kind)
    numbers = {name: _summable(column.detach()) for name, column in columns.items()}
    advantages = _computed(numbers, group_index, num_tokens, kind, eps, weights, k)
    return advantages if inverse is None else advantages[inverse]


def _computed(
    rewards: dict[str, Tensor],
    group_index: Tensor,
    num_tokens: Tensor | None,
    kind: str,
    eps: float,
    weights: Mapping[str, float] | None,
    k: int | None,
) -> Tensor:
    if kind == "gdpo":
        total = torch.zeros(len(group_index), dtype=torch.float64, device=group_index.device)
        for name, column in rewards.items():
            weight = 1.0 if weights is None else weights[name]
            total = total + weight * standardised(column.double(), group_index, eps)
        counts = torch.ones_like(total) if num_tokens is None else num_tokens.double()
        return scaled(*spread(total, counts), eps).float()
    (column,) = rewards.values()
    if kind == "loo_std":
        return leave_one_out(column, group_index, eps)
    if k is not None:
        return pass_at_k(column, group_index, k, eps)
    advantages: Tensor = _op(column, group_index, num_tokens, kind, eps)
    return advantages


def _check_options(rewards: Any, kind: str, weights: Any, k: Any, num_tokens: Any) -> None:
    """Raise ArgumentError for what only some kinds take, or lack."""
    if num_tokens is not None and kind not in OVER_THE_BATCH:
        raise ArgumentError(
            f"{WHAT}: num_tokens is given, but kind is {kind!r}. Fix: leave it out, or use kind='reinforce_pp'"
        )
    if isinstance(rewards, Mapping) != (kind == "gdpo") or (kind == "gdpo" and not rewards):
        shown = (
            "an empty dict" if isinstance(rewards, Mapping) and not rewards else kind_of(rewards)
        )
        raise ArgumentError(
            f"{WHAT}: rewards is {shown} and kind is {kind!r}. Fix: pass a dict of name to [B] rewards for "
            "kind='gdpo', one tensor [B] for the others"
        )
    if weights is not None:
        if not isinstance(weights, Mapping) or kind != "gdpo" or weights.keys() != rewards.keys():
            found = list(weights) if isinstance(weights, Mapping) else kind_of(weights)
            raise ArgumentError(
                f"{WHAT}: weights is {found} for kind {kind!r}. "
                "Fix: name each of the rewards, with kind='gdpo'"
            )
        for name, weight in weights.items():
            check_number(WHAT, f"weights[{name!r}]", weight)
    if kind == "pass_at_k":
        check_whole(WHAT, "k", k, fix="pass how many answers may be tried")
    elif k is not None:
        raise ArgumentError(
            f"{WHAT}: k is given, but kind is {kind!r}. Fix: leave it out, or use kind='pass_at_k'"
        )


def _first_and_inverse(unit_index: Tensor) -> tuple[Tensor, Tensor]:
    """The first sample of each unit [U], in the order of the batch, and the unit of each sample [B]; int64."""
    units, inverse = torch.unique(unit_index, return_inverse=True)
    count = len(unit_index)
    index = torch.arange(count, device=unit_index.device)
    first = index.new_full((len(units),), count).scatter_reduce(0, inverse, index, "amin")
    first, order = torch.sort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return first, rank[inverse]


def _check_alike(first: Tensor, inverse: Tensor, **columns: Tensor) -> None:
    """Raise ArgumentError where samples of one unit differ in a column [B]."""
    for name, column in columns.items():
        other = (column != column[first][inverse]).nonzero()[:, 0]
        if len(other):
            b = int(other[0])
            a = int(first[inverse[b]])
            raise ArgumentError(
                f"{WHAT}: {name}[{a}] is {column[a].item()} and {name}[{b}] is {column[b].item()}, "
                "but both are of one unit. "
                f"Fix: give samples of one unit one {name.replace('rewards', 'reward')}, or leave unit_index out"
            )


def _summable(rewards: Tensor) -> Tensor:
    """float64 rounded to 32 bits (Veltkamp's split): sums of equal rewards are exact, so that their std is 0."""
    if rewards.dtype != torch.float64:
        return rewards
    shifted = rewards * (2**21 + 1)
    return shifted - (shifted - rewards)


def _warn_alone(group_index: Tensor, kind: str) -> None:
    """Warn where each sample is the only one of its group, and gets 0 for it."""
    count = len(group_index)
    if count > 0 and kind != "reinforce_pp" and len(group_index.unique()) == count:
        warnings.warn(
            f"{WHAT}: each of {count} samples is alone in its group, so every advantage is 0 and "
            "nothing is learned. Fix: give samples of one prompt one group_id, or use kind='reinforce_pp'",
            GroupWarning,
            stacklevel=3,
        )


def _fake(
    rewards: Tensor, group_index: Tensor, num_tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    return rewards.new_empty(len(rewards), dtype=torch.float32)


_op = define_op("group_advantages", by_backend(GROUP_ADVANTAGES, "group_advantages"), _fake)
