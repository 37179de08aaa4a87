"""Advantages of rewards and of costs to one advantage: the only place where the two meet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.losses.constrained.multiplier import LagrangeMultiplier
from mmpack.losses.constrained.named import CostAdvantages, Named, RewardAdvantages


def constrained_advantages(
    rewards: RewardAdvantages,
    costs: CostAdvantages,
    multipliers: LagrangeMultiplier | Mapping[str, float],
) -> Tensor:
    """(A_r - sum of λ_i · A_i) / (1 + sum of λ_i), [B] or [N] float32, for `policy_loss`.

    A_r is the sum of the reward advantages, A_i the advantage of cost i, λ_i its multiplier. For one constraint this is
    PPO-Lagrangian, as Safe RLHF has it (arXiv 2310.12773): the division keeps the length of the step as λ
    grows. So a coefficient of KL or entropy, which is not divided, weighs (1 + λ) times more against it.

    With advantages of each name by themselves, in units of their own std (kind "grpo"), this is the scalarized
    advantage of Constrained GRPO (arXiv 2602.05863): λ weighs standardised terms. With kind "dr_grpo" or "rloo", which
    divide by nothing, λ is in rewards per cost, and is that of the constrained problem itself.

    Args: multipliers: λ of each name of `costs`, 0 or more. Sums are float64, in the order of the names.
    Raises ArgumentError for other types (Costs are no advantages), for names, shapes or devices that don't match, and
    for a λ below 0.

    Example:
        >>> import torch
        >>> from mmpack.losses.constrained import Costs, Rewards, constrained_advantages
        >>> paid = Rewards({"helpful": torch.tensor([1.0, 0.0])}).advantages(kind="dr_grpo")
        >>> charged = Costs({"harm": torch.tensor([1.0, 0.0])}).advantages(kind="dr_grpo")
        >>> constrained_advantages(paid, charged, {"harm": 3.0})
        tensor([-0.2500,  0.2500])
    """
    what = "constrained_advantages"
    _check_type("rewards", rewards, RewardAdvantages)
    _check_type("costs", costs, CostAdvantages)
    values = multipliers.values if isinstance(multipliers, LagrangeMultiplier) else multipliers
    if not isinstance(values, Mapping) or values.keys() != set(costs.names):
        named = isinstance(values, Mapping)
        found = f"of {', '.join(map(str, values)) or 'no cost'}" if named else kind_of(values)
        raise ArgumentError(
            f"{what}: multipliers are {found}, but the costs are {', '.join(costs.names)}. Fix: pass one for each cost"
        )
    for name, value in values.items():
        check_number(what, f"the multiplier of {name!r}", value, least=0)
    if (rewards.shape, rewards.per, rewards.device) != (costs.shape, costs.per, costs.device):
        raise ArgumentError(
            f"{what}: rewards are {rewards!r} on {rewards.device}, costs {costs!r} on {costs.device}. "
            "Fix: pass advantages of the same samples or tokens"
        )
    total = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
    for paid in rewards._values.values():
        total = total + rewards.sign * paid.double()
    for name, charged in costs._values.items():
        total = total + costs.sign * values[name] * charged.double()
    return (total / (1 + sum(values.values()))).float()


def _check_type(name: str, given: Named, wanted: type[Named]) -> None:
    if type(given) is not wanted:
        raise ArgumentError(
            f"constrained_advantages: {name} is {kind_of(given)}, expected {wanted.__name__}. "
            f"Fix: {wanted.__name__.removesuffix('Advantages')}s(…).advantages(group_index)"
        )
