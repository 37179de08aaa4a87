"""Truncation, recognised before all else: one side's ids are the beginning, or the end, of the other's.

Runs of placeholders count as one token each, so that images of other sizes don't hide it. What both sides have is
then compared by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.parity.causes.pair import (
    EDGE,
    LIMIT_OR_STOP,
    Hit,
    Pair,
    Side,
    first_run,
    possible,
    show_ids,
)
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.sample import Sample


@dataclass(frozen=True)
class Cut:
    """`kept`: of each side, the tokens [start, stop) that both have; a medium that was cut through is in neither."""

    short: int  # the side that was cut, 0 the rollout
    at_left: bool
    lost: tuple[int, int]  # tokens of the other side
    kept: tuple[tuple[int, int], tuple[int, int]]
    through: bool  # whether it goes through a medium
    cause: str
    evidence: str


def truncation(pair: Pair) -> Cut | None:
    """How one side was cut; None if it wasn't, or if what it lacks is no more than a turn's end."""
    folded = [_folded(side) for side in pair.sides]
    for at_left in (False, True):
        for short in (0, 1):
            if found := _cut(pair, folded, short, at_left):
                return found
    return None


def cut_at_left(pair: Pair) -> bool:
    """Whether one side's ids are the end of the other's and fewer, by truncation or by a turn that it lacks."""
    a, b = sorted((side.ids[_folded(side)] for side in pair.sides), key=len)
    return len(a) < len(b) and np.array_equal(a, b[len(b) - len(a) :])


def cut_hits(pair: Pair, cut: Cut) -> list[Hit]:
    """The cut; the media that went with it; the medium that it goes through."""
    side, other = pair.sides[cut.short], pair.sides[1 - cut.short]
    start, stop = cut.lost
    at = start if cut.short else len(pair.left)
    at = 0 if cut.at_left else at
    missing = "the ids begin later" if cut.at_left else "the ids end here"
    shown = missing, show_ids(other.ids[start:stop])
    left, right = shown if cut.short == 0 else shown[::-1]
    span = cut.lost if cut.short else (at, at)
    hits = [Hit(cut.cause, "input_ids", cut.evidence, left, right, at, span, at)]
    seen = {s.media_index for s in other.sample.modality_spans if s.stop > stop or s.start < start}
    lost = sorted({o.media_index for o in other.occurrences} - seen)
    if lost and len(side.sample.media) != len(other.sample.media):
        evidence = f"{cut.evidence}; media[{lost[0]}] of {other.name} was in that part"
        hits.append(Hit(cut.cause, "media", evidence, left, right, lost[0]))
    if cut.through:
        k = 0 if cut.at_left else len(side.runs) - 1
        first, last = int(side.runs.starts[k]), int(side.runs.stops[k])
        j = _run_of(other, cut)
        whole = int(other.runs.stops[j] - other.runs.starts[j])
        evidence = (
            f"a run of {last - first} placeholders in {side.name}, {whole} in {other.name}: "
            f"it {'begins' if cut.at_left else 'ends'} the ids"
        )
        counts = [f"{last - first} placeholders at {first}", f"{whole} placeholders"]
        one, two = counts if cut.short == 0 else counts[::-1]
        hits.append(Hit("truncated_medium", "modality_spans", evidence, one, two, at, None, at))
    return hits


def common_part(pair: Pair, cut: Cut) -> Pair:
    """Return the part that both sides have, as a pair of its own."""
    return Pair(
        *(
            part(side.sample, *cut.kept[k], _media(pair, cut, k))
            for k, side in enumerate(pair.sides)
        )
    )


def moved(hit: Hit, pair: Pair, cut: Cut) -> Hit:
    """A hit of the common part, counted in the rollout's own tokens and media."""
    media = _media(pair, cut, 0)
    if hit.field == "media" and hit.index is not None and hit.index < len(media):
        hit = replace(hit, index=media[hit.index])
    return shifted(hit, cut.kept[0][0])


def shifted(hit: Hit, start: int) -> Hit:
    """A hit of tokens from `start` on, counted in all of them."""
    index = hit.index
    if index is not None and hit.field != "media":
        index += start
    span = hit.span and (hit.span[0] + start, hit.span[1] + start)
    return replace(hit, index=index, span=span, at=None if hit.at is None else hit.at + start)


def part(sample: Sample, start: int, stop: int, media: list[int]) -> Sample:
    """Tokens [start, stop) of a sample with some of its media."""
    spans: dict[str, Any] = {
        name: [
            replace(s, start=max(s.start, start) - start, stop=min(s.stop, stop) - start)
            for s in getattr(sample, name) or []
            if s.start < stop and s.stop > start
        ]
        for name in ("modality_spans", "loss_spans", "observation_spans")
    }
    place = {old: new for new, old in enumerate(media)}
    spans["modality_spans"] = [
        replace(s, media_index=place.get(s.media_index, len(media)))
        for s in spans["modality_spans"]
    ]
    positions, mask = sample.position_ids, sample.attention_mask
    return replace(
        sample,
        input_ids=sample.input_ids[start:stop],
        media=[sample.media[i] for i in media],
        position_ids=None if positions is None else positions[:, start:stop],
        attention_mask=None if mask is None else mask[start:stop],
        **spans,
    )


def _media(pair: Pair, cut: Cut, k: int) -> list[int]:
    """The media of a side that are shown in the common part; all of them, where none went with the cut."""
    samples = [side.sample for side in pair.sides]
    if len(samples[0].media) == len(samples[1].media):
        return [*range(len(samples[k].media))]
    start, stop = cut.kept[k]
    spans = [s for s in samples[k].modality_spans if s.start < stop and s.stop > start]
    return sorted({s.media_index for s in spans if s.media_index < len(samples[k].media)})


def _folded(side: Side) -> np.ndarray:
    """int [n]: the text tokens, and the first of each run of placeholders."""
    keep = ~side.placeholder
    keep[side.runs.starts] = True
    return np.flatnonzero(keep)


def _cut(pair: Pair, folded: list[np.ndarray], short: int, at_left: bool) -> Cut | None:
    side, other = pair.sides[short], pair.sides[1 - short]
    mine, theirs = folded[short], folded[1 - short]
    if not len(mine) or len(mine) > len(theirs):
        return None
    a, b = side.ids[mine], other.ids[theirs]
    if not np.array_equal(a, b[len(b) - len(a) :] if at_left else b[: len(a)]):
        return None
    k = 0 if at_left else len(side.runs) - 1
    ends = side.placeholder[0 if at_left else -1] and not side.loss[0 if at_left else -1]
    j = k + len(other.runs) - len(side.runs) if at_left else k
    through = bool(ends) and _length(side, k) < _length(other, j)
    if len(a) == len(b) and not through:
        return None
    if at_left:
        lost = (0, int(theirs[len(b) - len(a)]))
        kept = [(0, len(side)), (lost[1], len(other))]
        if through:
            kept = [(int(side.runs.stops[0]), len(side)), (int(other.runs.stops[j]), len(other))]
            lost = (0, int(other.runs.stops[j]) - _length(side, 0))
    else:
        lost = (int(theirs[len(a)]) if len(a) < len(b) else len(other), len(other))
        kept = [(0, len(side)), (0, lost[0])]
        if through:
            kept = [(0, int(side.runs.starts[k])), (0, int(other.runs.starts[k]))]
            lost = (int(other.runs.starts[k]) + _length(side, k), len(other))
    named = _cause(pair, side, other, lost, at_left, through)
    if named is None:
        return None
    both = (kept[0], kept[1]) if short == 0 else (kept[1], kept[0])
    return Cut(short, at_left, lost, both, through, *named)


def _cause(
    pair: Pair, side: Side, other: Side, lost: tuple[int, int], at_left: bool, through: bool
) -> tuple[str, str] | None:
    """Cause and evidence, from what is missing; None where the text tokens decide (`text.py`)."""
    start, stop = lost
    where = "end" if at_left else "beginning"
    reasons = [s.sample.finish_reason for s in pair.sides]
    evidence = (
        f"{side.name}'s ids are the {where} of {other.name}'s, {stop - start} "
        f"{'token is' if stop - start == 1 else 'tokens are'} missing; "
        f"finish_reason: rollout {reasons[0]}, train {reasons[1]}"
    )
    ids = other.ids[start:stop]
    no_turns = not other.openings.any()
    if through:
        return "truncated", f"{evidence}; the cut goes through a medium"
    pictures = bool(other.placeholder[start:stop].any())
    if at_left:
        whole = no_turns or bool(side.openings[0])
        if whole and not pictures:
            return None  # may be a turn of the template
        return _by_turns(evidence, whole)
    loss = other.loss[start:stop]
    in_last = bool(loss.all()) and bool(other.loss[start - 1])
    ended = int(ids[-1]) in other.special_ids
    if stop - start == 1 and (ended or not other.special_ids) and loss.all():
        return None  # a stop token
    if in_last and "length" in reasons:
        return "truncated", evidence
    if in_last:
        return ("truncated", f"{evidence}: {LIMIT_OR_STOP}") if ended and stop - start > 1 else None
    if not loss.any() and stop - start <= EDGE:
        return None
    return _by_turns(evidence, no_turns or bool(other.openings[start : start + EDGE].any()))


def _by_turns(evidence: str, whole: bool) -> tuple[str, str]:
    if not whole:
        return "truncated", evidence
    why = "whole turns may be missing for another reason"
    return UNKNOWN, f"{evidence}; {why}; {possible('truncated', 'chat_template')}"


def _length(side: Side, k: int) -> int:
    return int(side.runs.stops[k] - side.runs.starts[k]) if 0 <= k < len(side.runs) else 0


def _run_of(other: Side, cut: Cut) -> int:
    """The run of the whole side that the cut goes through."""
    edge = cut.lost[1] if cut.at_left else cut.lost[0]
    return int(np.searchsorted(other.runs.starts, edge - 1, side="right")) - 1


_REPEATED = 4  # an id that is not special is padding where it stands so often in a row
Bounds = list[tuple[int, int]]  # of each side, the tokens [start, stop) within its edges


@dataclass(frozen=True)
class Edges:
    """The hits, and the pair within the edges."""

    hits: list[Hit]
    inner: Pair
    start: int  # the rollout's token at which it starts
    shift: bool  # whether it starts at another one in train

    def moved(self, hit: Hit) -> Hit:
        """A hit of the inner pair, counted in the rollout's own tokens."""
        return shifted(hit, self.start)


def edges(pair: Pair) -> Edges:
    """Find what only one side has around the conversation."""
    pads = [_pads(pair, at_left) for at_left in (True, False)]
    kept = [(a, len(s) - b) for s, a, b in zip(pair.sides, *pads, strict=True)]
    hits = []
    inner = pair
    if any(map(any, pads)):
        hits.append(_padding(pair, kept))
        inner = _within(pair, kept)
    heads = [side.ids[: side.head] for side in inner.sides]
    if not np.array_equal(heads[0], heads[1]):
        begun = [(start + len(head), b) for (start, b), head in zip(kept, heads, strict=True)]
        bare = _within(pair, begun)
        if _begin_alike(bare):
            hits.append(_first(inner, heads, kept[0][0]))
            inner, kept = bare, begun
    return Edges(hits, inner, kept[0][0], kept[0][0] != kept[1][0])


def _within(pair: Pair, kept: Bounds) -> Pair:
    left, right = (
        part(side.sample, *bounds, [*range(len(side.sample.media))])
        for side, bounds in zip(pair.sides, kept, strict=True)
    )
    return Pair(left, right)


def _pads(pair: Pair, at_left: bool) -> tuple[int, int]:
    """How many pad ids of each side, at one end, the other has not."""
    ends = [side.ids if at_left else side.ids[::-1] for side in pair.sides]
    runs = [first_run(ids == ids[:1]) for ids in ends]
    common = min(runs) if np.array_equal(ends[0][:1], ends[1][:1]) else 0
    one, two = (_surplus(s, n, common, at_left) for s, n in zip(pair.sides, runs, strict=True))
    return one, two


def _surplus(side: Side, run: int, common: int, at_left: bool) -> int:
    """How many of the `run` equal ids at one end, beyond those that both sides have, are padding.

    Ids in the loss were sampled, text is not repeated so often, and a single id at the right may be a stop token.
    """
    extra = run - common
    if not extra or run == len(side):
        return 0
    edge = slice(0, extra) if at_left else slice(len(side) - extra, len(side))
    pad, family = int(side.ids[edge][0]), side.family
    sampled = int(side.loss[edge].sum())
    marks = (*family.first_ids, *family.turn_ids, *family.starts, *family.ends)
    if pad in marks or pad in family.placeholder_ids.values():
        return 0
    if pad == family.pad_token_id and sampled > 1:
        return extra
    known = pad == family.pad_token_id and (at_left or run > 1)
    least = 1 if known else 2 if pad in side.special_ids else _REPEATED
    extra -= sampled
    return extra if extra >= least and sampled <= 1 else 0


def _padding(pair: Pair, kept: Bounds) -> Hit:
    shown = []
    for side, (start, stop) in zip(pair.sides, kept, strict=True):
        ends = ((start, "left", 0), (len(side) - stop, "right", -1))
        counts = [f"{n} on the {where} (id {side.ids[k]})" for n, where, k in ends if n]
        shown.append(f"pad ids: {', '.join(counts) or 'none'}")
    at_left = any(start for start, _ in kept)
    span = (0, kept[0][0]) if at_left else (kept[0][1], len(pair.left))
    evidence = (
        f"input_ids hold padding that the other side has not; rollout {shown[0]}; train {shown[1]}"
    )
    return Hit("padding_in_ids", "input_ids", evidence, shown[0], shown[1], span[0], span, span[0])


def _begin_alike(bare: Pair) -> bool:
    """Whether both go on with one first turn: else the ids before it went with what was cut off."""
    a, b = (side.ids[:1] for side in bare.sides)
    return len(a) > 0 and np.array_equal(a, b) and not cut_at_left(bare)


def _first(pair: Pair, heads: list[np.ndarray], start: int) -> Hit:
    names: dict[int, str] = {}
    for side in pair.sides:
        known = side.setting("tokenizer", "special_ids")
        known = known.items() if isinstance(known, dict) else ()
        names |= {i: str(name) for name, i in known if type(i) is int}
    shown = [
        ", ".join(f"{i} {names.get(i, '')}".rstrip() for i in head.tolist()) or "none"
        for head in heads
    ]
    evidence = (
        f"ids before the first turn: rollout {shown[0]}; train {shown[1]}; then both go on alike"
    )
    span = (start, start + len(heads[0]))
    one, two = map(show_ids, heads)
    return Hit("bos", "input_ids", evidence, one, two, start, span, start)
