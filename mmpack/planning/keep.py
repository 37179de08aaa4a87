"""Which samples a plan takes: those that keep every rule, fit into a bin by themselves, and are not too old.

And which groups it leaves for a later plan: the tail of long responses, for which all other ranks would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mmpack.errors import ArgumentError, PlanError, SchemaError, check_number
from mmpack.planning.budgets import Budgets
from mmpack.planning.planned import Dropped
from mmpack.progress import tracked
from mmpack.schema.rules import Problem, packing_problems, problems_of
from mmpack.schema.sample import Sample


class Age(NamedTuple):
    """`most`: how many versions of the weights a sample may be behind; `order`: their names, the oldest first."""

    most: int
    order: Sequence[str] | None

    def problems(self, samples: list[Sample], valid: list[int]) -> dict[int, Problem]:
        """Problems of the samples with a token that older weights wrote than `most` allows (MM409)."""
        place = self._places(samples, valid)
        newest = max(place.values(), default=0)
        out = {}
        for i in valid:
            names = [v.version for v in samples[i].policy_versions or ()]
            behind = max((newest - place[name] for name in names), default=0)
            if behind > self.most:
                oldest = min(names, key=place.__getitem__)
                message = f"begin with weights {oldest!r:.60}, {behind} versions behind, max_policy_lag is {self.most}"
                out[i] = Problem("MM409", samples[i].sample_id, "policy_versions", message)
        return out

    def _places(self, samples: list[Sample], valid: list[int]) -> dict[str, int]:
        """The place of each version in time."""
        names = {v.version for i in valid for v in samples[i].policy_versions or ()}
        if self.order is not None:
            place = {name: k for k, name in enumerate(self.order)}
            unknown = sorted(names - place.keys())
            if unknown:
                raise ArgumentError(
                    f"plan: policy_versions lacks {unknown[0]!r:.60}, which samples name. "
                    "Fix: pass all names of weights, the oldest first"
                )
            return place
        odd = sorted(name for name in names if not name.isdecimal())
        if odd:
            raise ArgumentError(
                f"plan: {odd[0]!r:.60} names weights but is not a number, so its age is unknown. "
                "Fix: pass policy_versions=[…], all names, the oldest first"
            )
        return {name: int(name) for name in names}


def check_age(max_policy_lag: int | None, policy_versions: Sequence[str] | None) -> Age | None:
    """The age that is asked for. Raises ArgumentError."""
    if max_policy_lag is None:
        if policy_versions is not None:
            raise ArgumentError(
                "plan: policy_versions has no effect without max_policy_lag. Fix: pass both"
            )
        return None
    check_number("plan", "max_policy_lag", max_policy_lag, least=0)
    if policy_versions is None:
        return Age(max_policy_lag, None)
    names = [policy_versions] if isinstance(policy_versions, str) else list(policy_versions)
    if len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            "plan: policy_versions must be distinct names. Fix: pass all names of weights, the oldest first"
        )
    return Age(max_policy_lag, names)


def sort_out(
    samples: list[Sample], budgets: Budgets | None, age: Age | None, on_invalid: str
) -> tuple[list[int], list[Dropped]]:
    """Indices of the samples to plan, and the others.

    What is too old is dropped in either mode: it is no fault of the data. `budgets`: None: rules only.
    Raises: SchemaError with all broken rules, PlanError for a sample over a budget or of another family.
    """
    broken = [list(problems_of(s)) + packing_problems(s) for s in tracked(samples, "planning")]
    if on_invalid == "raise" and any(broken):
        raise SchemaError([p for problems in broken for p in problems], "plan")
    valid = [i for i, problems in enumerate(broken) if not problems]
    if age is not None:
        for i, problem in age.problems(samples, valid).items():
            broken[i] = [problem]
        valid = [i for i in valid if not broken[i]]
    if budgets is not None:
        over = []
        for i in valid:
            if problems := budgets.excess(samples[i]):
                broken[i] = problems
                over.append(i)
        if over and on_invalid == "raise":
            raise PlanError(_over(samples, over, broken, budgets))
        valid = [i for i in valid if not broken[i]]
    _refuse_two_families(samples, valid)
    dropped = [
        Dropped(i, s.__dict__.get("sample_id"), s.__dict__.get("group_id"), tuple(problems))  # type: ignore[arg-type]
        for i, (s, problems) in enumerate(zip(samples, broken, strict=True))
        if problems
    ]
    return valid, dropped


def tail_of(samples: list[Sample], kept: list[int], share: float) -> list[int]:
    """Indices of the samples in the groups whose longest sample is longest: that share of the groups, rounded down.

    Source: RollPacker (Gao et al. 2025): responses of a few prompts are many times as long as the others', and are
    trained together in a step of their own.
    """
    longest: dict[Any, tuple[int, int]] = {}  # length, and the first index, which settles ties
    for i in kept:
        group = samples[i].group_id
        length, first = longest.get(group, (0, i))
        longest[group] = max(length, len(samples[i])), first
    groups = sorted(longest, key=lambda g: (-longest[g][0], -longest[g][1]))
    tail = set(groups[: int(share * len(groups))])
    return [i for i in kept if samples[i].group_id in tail]


def _over(
    samples: list[Sample], over: list[int], broken: list[list[Problem]], budgets: Budgets
) -> str:
    """The first sample over a budget, and what would let all of them in."""
    enough = budgets.enough_for([samples[i] for i in over])
    count = f"{len(over)} samples are" if len(over) > 1 else "it is the only one"
    all_in = f"{count} over a budget: {enough} would take " + (
        "them all" if len(over) > 1 else "it"
    )
    return f"plan: samples[{over[0]}] {broken[over[0]][0]}; {all_in}"


def _refuse_two_families(samples: list[Sample], kept: list[int]) -> None:
    families = {samples[i].family: i for i in reversed(kept)}
    if len(families) > 1:
        (a, i), (b, j) = sorted(families.items(), key=lambda item: item[1])[:2]
        raise PlanError(
            f"plan: samples[{i}] is of family {a}, samples[{j}] of {b} (MM406). "
            "Fix: plan each family separately"
        )
