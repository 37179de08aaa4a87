"""Lagrange multipliers: what a unit of each cost weighs against reward, moved until each cost keeps its limit.

Numbers of the host, float64: one per constraint, the same on all ranks, saved as JSON. `constrained_advantages` is the
only place where rewards and costs meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, check_whole, kind_of
from mmpack.losses.constrained.named import CostAdvantages, Costs, Named, RewardAdvantages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WHAT = "LagrangeMultiplier"


@dataclass(frozen=True)
class DualAscent:
    """λ ← max(0, λ + learning_rate · (J - d)): gradient ascent of the dual, projected (as in arXiv 1805.11074)."""

    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        check_number("DualAscent", "learning_rate", self.learning_rate, above=0)


@dataclass(frozen=True)
class PID:
    """λ ← max(0, kp · Δ + ki · I + kd · D) with Δ = J - d, I ← max(0, I + Δ), D = max(0, J - previous J).

    Algorithm 2 of arXiv 2007.03964. P and D damp the oscillation that the integral makes; with kp = kd = 0 it is
    dual ascent of the learning rate ki.
    """

    kp: float = 0.05
    ki: float = 0.01
    kd: float = 0.01

    def __post_init__(self) -> None:
        for name, gain in asdict(self).items():
            check_number("PID", name, gain, least=0)
        if self.ki == 0:
            raise ArgumentError(
                "PID: ki is 0, so λ drops to 0 as soon as costs are within the limit. Fix: pass ki above 0"
            )


@dataclass
class _State:
    """State of one constraint."""

    value: float
    integral: float = 0.0  # of PID
    previous: float | None = None  # the cost before, of PID


class LagrangeMultiplier:
    """λ of each constraint: mean cost per sample J ≤ limit d. `update` moves it after each batch.

    Args:
        limits: d of each cost, by name, in the unit of its Costs.
        rule: DualAscent or PID.
        initial: λ before the first `update`, one or by name: a warm start where the first policy already breaks a
            limit. The integral of PID starts at initial / ki, so that λ goes on from there.
        maximum: λ never exceeds it. While it would, the integral of PID does not grow (no windup), so that λ falls as
            soon as the cost does.

    The state is numbers of the host. `state_dict` is JSON; `load_state_dict` goes on to the same bits.

    Example:
        >>> import torch
        >>> from mmpack.losses.constrained import Costs, DualAscent, LagrangeMultiplier
        >>> multiplier = LagrangeMultiplier({"harm": 0.25}, DualAscent(1.0))
        >>> multiplier.update(Costs({"harm": torch.tensor([1.0, 0.0])}))
        {'harm': 0.25}
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        rule: DualAscent | PID | None = None,
        *,
        initial: float | Mapping[str, float] = 0.0,
        maximum: float | None = None,
    ) -> None:
        rule = DualAscent() if rule is None else rule
        if type(rule) not in (DualAscent, PID):
            raise ArgumentError(
                f"{WHAT}: rule is {kind_of(rule)}, expected DualAscent or PID. Fix: pass rule=PID(0.05, 0.01, 0.01)"
            )
        _check_names("limits", limits, None)
        for name, limit in limits.items():
            check_number(WHAT, f"the limit of {name!r}", limit)
        if maximum is not None:
            check_number(WHAT, "maximum", maximum, above=0)
        starts = initial if isinstance(initial, Mapping) else dict.fromkeys(limits, initial)
        _check_names("initial", starts, set(limits))
        for name, start in starts.items():
            check_number(WHAT, f"the initial value of {name!r}", start, least=0, most=maximum)
        self.limits = {name: float(limit) for name, limit in limits.items()}
        self.rule = rule
        self.maximum = maximum
        self.steps = 0
        self._states = {name: self._started(float(starts[name])) for name in limits}

    @property
    def values(self) -> dict[str, float]:
        """λ of each constraint."""
        return {name: state.value for name, state in self._states.items()}

    def update(
        self, costs: Costs | Mapping[str, float], group: ProcessGroup | None = None
    ) -> dict[str, float]:
        """One step by the mean costs of a batch; returns the new `values`.

        Args:
            costs: Costs per sample [B], of the whole batch or of this rank's part, not clipped away from the unit of
                the limits; or their means by name. Names without a limit are left out.
            group: the ranks that share the batch. Sums and counts are gathered in the order of ranks, so each sample
                counts once and all ranks move to the same bits. Every rank must call it, also one without samples.

        Raises ArgumentError for other types, costs per token, a limit without a cost, and means or a λ that are not
        finite; with a group on all ranks, and the state stays as it was.
        """
        means = self._gathered(costs, group) if group is not None else self._means(costs)
        _check_names("costs", means, set(self.limits), more=True)
        for name in self.limits:
            check_number(f"{WHAT}.update", f"the cost {name!r}", means[name])
        moved = {name: replace(state) for name, state in self._states.items()}
        for name, state in moved.items():
            self._step(state, float(means[name]) - self.limits[name], float(means[name]))
            for part in ("value", "integral"):
                fix = "use smaller gains, or pass maximum="
                check_number(
                    f"{WHAT}.update", f"the {part} of {name!r}", getattr(state, part), fix=fix
                )
        self._states = moved
        self.steps += 1
        return self.values

    def state_dict(self) -> dict[str, Any]:
        """Everything that `update` changes, as JSON values."""
        return {
            "rule": type(self.rule).__name__,
            "steps": self.steps,
            "states": {name: asdict(state) for name, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Limits, gains and the maximum are those of this object.

        Raises ArgumentError for another rule, other names, and values that are no state; nothing is changed then.
        """
        what = f"{WHAT}.load_state_dict"
        if not isinstance(state, Mapping) or state.keys() != {"rule", "steps", "states"}:
            raise ArgumentError(f"{what}: this is not a state. Fix: pass what state_dict returned")
        if state["rule"] != type(self.rule).__name__:
            raise ArgumentError(
                f"{what}: the state is of {state['rule']!r:.40}, but this rule is {type(self.rule).__name__}. "
                "Fix: use the same rule, or start over with initial=values"
            )
        check_whole(what, "steps", state["steps"], least=0)
        _check_names("the state", state["states"], set(self.limits))
        loaded = {}
        for name in self.limits:
            one = state["states"][name]
            if not isinstance(one, Mapping) or one.keys() != set(_State.__dataclass_fields__):
                raise ArgumentError(f"{what}: {name!r} is {one!r:.60}. Fix: pass a state_dict")
            check_number(what, f"the value of {name!r}", one["value"], least=0, most=self.maximum)
            check_number(what, f"the integral of {name!r}", one["integral"], least=0)
            if one["previous"] is not None:
                check_number(what, f"the cost before of {name!r}", one["previous"])
            loaded[name] = _State(**one)
        self._states, self.steps = loaded, int(state["steps"])

    def __repr__(self) -> str:
        shown = ", ".join(f"{n!r}: {v:.4g}" for n, v in self.values.items())
        return f"{WHAT}({{{shown}}}, {self.rule}, steps={self.steps})"

    def _started(self, value: float) -> _State:
        return _State(value, value / self.rule.ki if isinstance(self.rule, PID) else 0.0)

    def _step(self, state: _State, error: float, cost: float) -> None:
        if isinstance(self.rule, DualAscent):
            state.value = self._bounded(state.value + self.rule.learning_rate * error)
            return
        rule = self.rule
        rise = max(0.0, cost - state.previous) if state.previous is not None else 0.0
        integral = max(0.0, state.integral + error)
        damping = rule.kp * error + rule.kd * rise
        saturated = self.maximum is not None and damping + rule.ki * integral > self.maximum
        if saturated and integral > state.integral:
            integral = state.integral
        state.integral, state.previous = integral, cost
        state.value = self._bounded(damping + rule.ki * integral)

    def _bounded(self, value: float) -> float:
        return max(0.0, value if self.maximum is None else min(value, self.maximum))

    def _means(self, costs: Costs | Mapping[str, float]) -> Mapping[str, float]:
        if isinstance(costs, Costs):
            _check_per_sample(costs)
            return costs.mean()
        if not isinstance(costs, Mapping):
            raise ArgumentError(
                f"{WHAT}.update: costs is {kind_of(costs)}, expected Costs or means by name. "
                "Fix: pass Costs({'name': tensor}); advantages have no limit"
            )
        return costs

    def _gathered(self, costs: Any, group: ProcessGroup) -> dict[str, float]:
        """Means over the ranks of a group; a fault of one rank is raised on all of them, so that none waits."""
        from torch import distributed

        mine: Any
        try:
            if not isinstance(costs, Costs):
                raise ArgumentError(
                    f"{WHAT}.update: costs is {kind_of(costs)} with a group. "
                    "Fix: pass Costs, which know their number of samples"
                )
            _check_per_sample(costs)
            mine = costs.sums()
        except ArgumentError as error:
            mine = str(error)
        parts: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, mine, group=group)
        for rank, part in enumerate(parts):
            if isinstance(part, str):
                raise ArgumentError(f"{part} (rank {rank})")
            if part[0].keys() != parts[0][0].keys():
                raise ArgumentError(
                    f"{WHAT}.update: rank {rank} has {', '.join(part[0])}, rank 0 {', '.join(parts[0][0])}. "
                    "Fix: pass the same names on all ranks"
                )
        count = sum(part[1] for part in parts)
        if count == 0:
            raise ArgumentError(f"{WHAT}.update: no rank has a sample. Fix: skip empty batches")
        return {name: sum(part[0][name] for part in parts) / count for name in parts[0][0]}


def _check_per_sample(costs: Costs) -> None:
    if costs.per != "sample":
        raise ArgumentError(
            f"{WHAT}.update: costs are per token, but limits are per sample. Fix: pass costs.per_sample(batch.cu_loss)"
        )


def _check_names(what: str, given: Any, wanted: set[str] | None, more: bool = False) -> None:
    """A dict with at least one name, and those that are wanted (or `more`)."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(n, str) for n in given):
        raise ArgumentError(
            f"{WHAT}: {what} is {given!r:.60}, expected numbers by name. Fix: pass {{'harm': 0.1}}"
        )
    missing = sorted((wanted or set()) - given.keys())
    surplus = [] if more or wanted is None else sorted(given.keys() - wanted)
    if missing or surplus:
        found = f"lacks {missing[0]!r}" if missing else f"has {surplus[0]!r}, which has no limit"
        raise ArgumentError(f"{WHAT}: {what} {found}. Fix: name each limit once, and no other")


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
