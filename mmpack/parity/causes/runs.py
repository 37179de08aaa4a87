"""Runs of placeholders that do not fit their grids, or that the policy wrote; and rules that a sample breaks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair, Side
from mmpack.parity.causes.settings import decisive
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem, rule_problems, structured
from mmpack.schema.sample import Sample, unpadded


def run_hits(pair: Pair, media: list[Hit]) -> list[Hit]:
    """One hit for each cause; `unknown` if runs differ though both sides' grids are equal and nothing tells why.

    `media`: the hits of the media, one of which may be that a medium is shown less often.
    """
    hits: dict[str, Hit] = {}
    if pair.other_sound:
        hits["audio_in_video"] = _sound(pair)
    for side in pair.sides:
        for hit in [*_sampled(pair, side), *_expansion(pair, side)]:
            hits.setdefault(hit.cause, hit)
    if not hits and not any(hit.cause == "dropped_image" for hit in media):
        return list(_unexplained(pair))
    return list(hits.values())


def _sampled(pair: Pair, side: Side) -> Iterator[Hit]:
    """A placeholder inside a loss span, or one without a medium directly beside loss tokens."""
    mine = sampled_runs(side)
    if not mine.any():
        return
    starts, stops = side.runs.starts, side.runs.stops
    k = int(np.argmax(mine))
    inside = side.loss[starts[k] : stops[k]]
    start = int(starts[k]) + (int(np.argmax(inside)) if inside.any() else 0)
    where = "inside a loss span" if inside.any() else "beside loss tokens, of no medium"
    evidence = f"placeholder {side.ids[start]} at token {start} of {side.name}, {where}"
    yield _hit(pair, side, "sampled_placeholder", evidence, start, int(stops[k]))


def sampled_runs(side: Side) -> np.ndarray:
    """bool [O]: runs that the policy wrote: in or beside the loss, and neither observed nor a whole medium's."""
    starts, stops = side.runs.starts, side.runs.stops
    if not len(starts):
        return np.zeros(0, dtype=bool)
    whole = np.array([stop - start == wanted for start, stop, wanted in _expected(side)])
    beside = np.append(side.loss, False)
    mine = side.loss[starts] | side.loss[stops - 1]
    mine |= ~side.claimed[starts] & (beside[starts - 1] | beside[stops])
    return mine & ~whole & ~side.observed[starts]


def _expansion(pair: Pair, side: Side) -> Iterator[Hit]:
    for start, stop, wanted in _expected(side):
        count = stop - start
        if wanted == count or wanted == 0 or side.loss[start]:
            continue
        evidence = f"a run of {count} placeholders in {side.name}, its grid gives {wanted}"
        if count < wanted and stop == len(side):
            yield _hit(pair, side, "truncated_medium", f"{evidence}: it ends the ids", start, stop)
        elif count == 1:
            yield _hit(pair, side, "not_expanded", evidence, start, stop)
        elif count == wanted**2 or (count % wanted == 0 and not _other_patches(pair, side, start)):
            times = "squared" if count == wanted**2 else f"times {count // wanted}"
            yield _hit(pair, side, "double_expansion", f"{evidence} ({times})", start, stop)


def _other_patches(pair: Pair, side: Side, start: int) -> bool:
    """Whether patch or merge sizes differ, from which other runs follow."""
    video = bool(side.runs.is_video[np.searchsorted(side.runs.starts, start)])
    return decisive(pair, "video" if video else "image") is not None


def _expected(side: Side) -> Iterator[tuple[int, int, int]]:
    """(start, stop, placeholders that the grids give) of each run whose media are known."""
    starts, stops = side.runs.starts, side.runs.stops
    media, spans = side.sample.media, side.sample.modality_spans
    wanted = [0] * len(starts)
    if spans:
        of = np.searchsorted(starts, [s.start for s in spans], side="right") - 1
        for span, k in zip(spans, of.tolist(), strict=True):
            if k < 0 or span.start >= stops[k] or span.media_index >= len(media):
                continue
            medium = media[span.media_index]
            if span.chunk is not None:  # a piece of a video with its sound, whose rule is MM117
                wanted[k] += span.stop - span.start
                continue
            pieces, tokens = _pieces(side, medium), side.tokens_of(medium)
            whole = span.stop - span.start == tokens  # one span of all pieces, nothing between them
            wanted[k] += tokens if whole else tokens // pieces
    elif len(media) == len(starts):
        wanted = [side.tokens_of(medium) for medium in media]
    yield from zip(starts.tolist(), stops.tolist(), wanted, strict=True)


def _sound(pair: Pair) -> Hit:
    """Return a hit for the first video whose sound lies among its placeholders on one side only."""
    spans = [side.sample.modality_spans for side in pair.sides]
    among = next(k for k, of in enumerate(spans) if any(s.chunk is not None for s in of))
    index = next(s.media_index for s in spans[among] if s.chunk is not None)
    first = next((s for s in spans[0] if s.media_index == index), spans[0][0])
    shown = ["among the video's placeholders", "apart from the video's placeholders"]
    left, right = shown if among == 0 else shown[::-1]
    evidence = f"the sound of media[{index}] lies {shown[0]} in {pair.sides[among].name} only"
    at = max(first.start - 2, 0)  # with the marks that open video and sound
    span = (first.start, first.stop)
    return Hit("audio_in_video", "modality_spans", evidence, left, right, first.start, span, at)


def _pieces(side: Side, medium: Medium) -> int:
    return max(side.family.spans_of(medium.modality, medium.grid_thw), 1)


def _unexplained(pair: Pair) -> Iterator[Hit]:
    """Runs of other lengths on both sides, though the media say the same."""
    sizes = [side.runs.stops - side.runs.starts for side in pair.sides]
    if np.array_equal(*sizes):
        return
    grids = [[tuple(m.grid_thw) for m in side.sample.media] for side in pair.sides]
    if grids[0] != grids[1]:
        return
    shorter = min(len(s) for s in sizes)
    unlike = np.flatnonzero(sizes[0][:shorter] != sizes[1][:shorter])
    k = int(unlike[0]) if len(unlike) else shorter
    counts = [f"{s[k]} placeholders" if k < len(s) else "no such run" for s in sizes]
    side = pair.sides[0] if k < len(sizes[0]) else pair.sides[1]
    start, stop = int(side.runs.starts[k]), int(side.runs.stops[k])
    seen = f"run {k} of placeholders: rollout {counts[0]}, train {counts[1]}, grids are equal"
    for one, lengths in zip(pair.sides, sizes, strict=True):
        media = [m for m in one.sample.media if _pieces(one, m) > 1]
        if k < len(lengths) and int(lengths[k]) in [one.tokens_of(m) for m in media]:
            seen += f": {one.name} lacks the ids between the rows, tiles or frames of a medium"
    yield Hit(UNKNOWN, "input_ids", seen, counts[0], counts[1], start, (start, stop), start)


def _hit(pair: Pair, side: Side, cause: str, evidence: str, start: int, stop: int) -> Hit:
    shown = f"{stop - start} placeholders at {start}"
    other = "no such run"
    left, right = (shown, other) if side is pair.left else (other, shown)
    field = "loss_spans" if cause == "sampled_placeholder" else "modality_spans"
    return Hit(cause, field, evidence, left, right, start, (start, stop), start)


_CAUSES = {"MM107": "dropped_image", "MM109": "cache_key", "MM204": "loss_mask_shift"}
_RUN_CODES = ("MM101", "MM103", "MM104", "MM105")
_KEY_CODES = ("MM101", "MM108")  # a medium under another's key has the other's grid
# spans, turns and media that were cut off with the ids
_CUT_CODES = (*_RUN_CODES, "MM106", "MM107", "MM110", "MM205", "MM304")
_FOLLOW = {  # what else a cause breaks
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
    return left, right, [_broken(UNKNOWN, *found) for found in _by_rule(*broken)]


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
            hits.append(_broken(_cause(side, problem), problem, where, shown))
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


def _broken(cause: str, problem: Problem, where: str, shown: tuple[str, str]) -> Hit:
    start = problem.span[0] if problem.span else None
    field = problem.field.partition("[")[0]
    evidence = f"{problem.code} in {where}: {problem.field} {problem.message}"
    fix = f"{problem.fix[0].upper()}{problem.fix[1:]}." if cause == UNKNOWN else ""
    return Hit(cause, field, evidence, *shown, start, problem.span, fix=fix)


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
