"""Rules of the schema that a sample breaks, as hits: parity reads such a sample and names the break."""

from __future__ import annotations

from collections.abc import Iterator

from mmpack.parity.causes.pair import Hit, Pair, Side
from mmpack.parity.causes.runs import sampled_runs
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.rules import Problem, rule_problems, structured
from mmpack.schema.sample import Sample, unpadded

_CAUSES = {"MM107": "dropped_image", "MM109": "cache_key", "MM204": "loss_mask_shift"}
_RUN_CODES = ("MM101", "MM103", "MM104", "MM105")
_KEY_CODES = ("MM101", "MM108")  # a medium under another's key has the other's grid
# spans, turns and media that were cut off with the ids
_CUT_CODES = (*_RUN_CODES, "MM106", "MM107", "MM110", "MM205", "MM304")
_FOLLOW = {  # what a cause breaks besides
    "model_family": (*_RUN_CODES, "MM102", "MM108"),
    "cache_key": _KEY_CODES,
    "double_expansion": _RUN_CODES,
    "not_expanded": _RUN_CODES,
    "sampled_placeholder": _RUN_CODES,
    "dropped_image": _RUN_CODES,
    "coordinate_system": ("MM311",),
    "truncated": _CUT_CODES,
    "truncated_medium": _CUT_CODES,
}
_KEPT = "keeps this rule"

Broken = tuple[dict[str, Problem], dict[str, Problem]]


def broken_rules(pair: Pair) -> Broken:
    """The first break of each rule, by code, of each side."""
    left, right = pair.left.sample, pair.right.sample
    broken = _first_breaks(left)
    return broken, broken if left is right else _first_breaks(right)


def _first_breaks(sample: Sample) -> dict[str, Problem]:
    found: dict[str, Problem] = {}
    for problem in rule_problems(sample):
        found.setdefault(problem.code, problem)
    return found


def structured_pair(left: Sample, right: Sample) -> tuple[Sample, Sample, list[Hit]]:
    """Both sides as `read_trace` returns them, and a hit for each rule of structure (MM0xx) that a side breaks.

    No field of such a sample can be compared.
    """
    (left, left_faults), (right, right_faults) = structured(left), structured(right)
    if not left_faults and not right_faults:
        return unpadded(left), unpadded(right), []
    broken: Broken = ({}, {})
    for found, sample, faults in zip(
        broken, (left, right), (left_faults, right_faults), strict=True
    ):
        for fault in faults:
            code = fault.code or "MM003"
            found.setdefault(code, Problem(code, sample.sample_id, fault.where, fault.why))
    return left, right, [_hit(UNKNOWN, *found) for found in _by_rule(*broken)]


def rule_hits(pair: Pair, first: Broken, known: list[Hit]) -> list[Hit]:
    """One hit for each broken rule of each side; one for both sides where they break it alike.

    Breaks that follow from a cause among `known` are left out.
    """
    causes = {hit.cause for hit in known}
    follow = {code for cause, codes in _FOLLOW.items() if cause in causes for code in codes}
    hits = []
    for problem, where, shown in _by_rule(*first):
        if problem.code not in follow:
            side = pair.right if where == "train" else pair.left
            hits.append(_hit(_cause(side, problem), problem, where, shown))
    return hits


def _by_rule(
    left: dict[str, Problem], right: dict[str, Problem]
) -> Iterator[tuple[Problem, str, tuple[str, str]]]:
    """(problem, where, what each side shows) of each rule and side."""
    for code in dict.fromkeys([*left, *right]):
        one, two = left.get(code), right.get(code)
        if one is not None and one == two:
            yield one, "both sides", (one.message, one.message)
            continue
        if one is not None:
            yield one, "rollout", (one.message, _KEPT)
        if two is not None:
            yield two, "train", (_KEPT, two.message)


def _hit(cause: str, problem: Problem, where: str, shown: tuple[str, str]) -> Hit:
    start = problem.span[0] if problem.span else None
    return Hit(
        cause=cause,
        field=problem.field.partition("[")[0],
        evidence=f"{problem.code} in {where}: {problem.field} {problem.message}",
        left=shown[0],
        right=shown[1],
        index=start,
        span=problem.span,
        fix=f"{problem.fix[0].upper()}{problem.fix[1:]}." if cause == UNKNOWN else "",
    )


def _cause(side: Side, problem: Problem) -> str:
    sample = side.sample
    if problem.code == "MM106":
        beyond = any(s.media_index >= len(sample.media) for s in sample.modality_spans)
        return "dropped_image" if beyond else UNKNOWN
    if problem.code == "MM107" and (side.placeholder & ~side.claimed).any():
        return UNKNOWN  # it may be shown: spans are missing, not media
    if problem.code == "MM203":
        return "sampled_placeholder" if sampled_runs(side).any() else "loss_mask_shift"
    if problem.code == "MM305":
        empty = [s.start == s.stop for s in sample.loss_spans]
        return "empty_response" if any(empty) or not empty else UNKNOWN
    return _CAUSES.get(problem.code, UNKNOWN)
