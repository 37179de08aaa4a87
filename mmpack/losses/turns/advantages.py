"""Advantages of turns [K]: of whole trajectories, of returns, of rewards normalised first, and GiGPO's two levels."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number
from mmpack.losses.advantages.group import WithinGroup, group_advantages
from mmpack.losses.returns.returns import scan_op
from mmpack.losses.samples import check_column, check_columns, check_finite
from mmpack.ops.segments import segment_ids, segment_sum

Method = Literal["trajectory", "returns", "process", "gigpo"]


def turn_advantages(
    rewards: Tensor,
    cu_turns: Tensor,
    group_index: Tensor,
    method: Method = "returns",
    kind: WithinGroup = "grpo",
    *,
    gamma: float = 1.0,
    anchor: Tensor | None = None,
    omega: float = 1.0,
    eps: float = 1e-6,
    check: bool = True,
) -> Tensor:
    """Advantages [K] float32 of turns, over the whole batch, without gradient.

    - `trajectory`: of the sum of each trajectory's rewards, the same for all of its turns.
    - `returns`: of each turn's discounted return, among all turns of the group.
    - `process`: each turn's reward, normalised among all turns of the group, then summed from the turn to the
      trajectory's end (process supervision, arXiv 2402.03300 section 4.1.3; gamma discounts the sum, 1 there).
    - `gigpo`: `trajectory` + omega · (the discounted return's advantage among the turns of the group that began in the
      same state) (GiGPO, arXiv 2505.10978 eq. 3 and 7). A state that is met once adds 0.

    Args: rewards: [K] float, as `turns.rewards()`. cu_turns: [J+1] int, the turns of each trajectory. group_index: [J]
    int, the task of each trajectory. kind: how a group is compared, as in `mp.group_advantages`; GiGPO's F_norm is the
    std with `grpo`, 1 with `dr_grpo`. gamma: from 0 to 1. anchor: [K] int, a number for the state in which each turn
    began (`mp.group_numbers` of its hash), for `gigpo`. omega: weight of the second part. eps, check: as in
    `mp.group_advantages`.

    Turns follow each other by number: a return also counts later branches and retries of its trajectory.
    A trajectory without turns counts as one with the reward 0. Raises ArgumentError for shapes, dtypes and devices
    that don't fit, numbers out of their range, and rewards that are not finite.

    Example: two trajectories of two turns, which begin in one state.
        >>> import torch
        >>> import mmpack as mp
        >>> rewards, cu_turns = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 2, 4])
        >>> group_index, anchor = torch.tensor([0, 0]), torch.tensor([7, 8, 7, 9])
        >>> mp.losses.turn_advantages(rewards, cu_turns, group_index, "gigpo", "dr_grpo", anchor=anchor)
        tensor([ 1.0000,  0.5000, -1.0000, -0.5000])
    """
    what = "turn_advantages"
    check_name(what, "method", method, get_args(Method))
    check_name(what, "kind", kind, get_args(WithinGroup))
    for name, number in (("gamma", gamma), ("omega", omega)):
        check_number(what, name, number, least=0, most=1 if name == "gamma" else None)
    check_columns(what, cu_turns, {"rewards": rewards}, offsets="cu_turns")
    size, fix = len(cu_turns) - 1, "pass one number per trajectory"
    check_column(what, "group_index", group_index, size, "integers", cu_turns, fix)
    if (anchor is None) == (method == "gigpo"):
        raise ArgumentError(
            f"{what}: anchor is {'None' if anchor is None else 'given'} and method is {method!r}. "
            "Fix: pass each turn's state with method='gigpo', and only with it"
        )
    if anchor is not None:
        fix = "pass one number per turn"
        check_column(what, "anchor", anchor, len(rewards), "integers", cu_turns, fix)
    rewards = rewards.detach()
    if check and not torch.compiler.is_compiling():
        check_finite(what, "rewards", rewards)
    trajectory = segment_ids(cu_turns, len(rewards))
    group = group_index[trajectory]

    def returns(of: Tensor, wide: bool) -> Tensor:
        scanned: Tensor = scan_op(of, None, None, cu_turns, gamma, gamma, wide)
        return scanned[0]

    if method == "returns":
        return group_advantages(returns(rewards, True), group, kind, eps, check=check)
    if method == "process":
        normal = group_advantages(rewards, group, kind, eps, check=check)
        return returns(normal, False)
    totals = segment_sum(rewards, cu_turns)
    whole = group_advantages(totals, group_index, kind, eps, check=check)[trajectory]
    if anchor is None:
        return whole
    paired = _paired(group, anchor)
    step = group_advantages(returns(rewards, True), paired, kind, eps, check=False)
    return whole + omega * step


def _paired(a: Tensor, b: Tensor) -> Tensor:
    """A number for each pair of a [K] and b [K], int64, without a look at how many there are."""
    order = torch.sort(b, stable=True)[1]
    order = order[torch.sort(a[order], stable=True)[1]]
    a, b = a[order], b[order]
    begins = torch.ones_like(order)
    begins[1:] = ((a[1:] != a[:-1]) | (b[1:] != b[:-1])).long()
    return torch.empty_like(order).index_copy_(0, order, begins.cumsum(0))
