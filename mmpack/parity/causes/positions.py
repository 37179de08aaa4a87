"""Positions that differ: each side is fitted by rule, temporal step and offset, and what is unlike names the cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np

from mmpack.errors import MmpackError
from mmpack.layout.mrope import grids_of_media, mrope_positions
from mmpack.parity.causes.frame_choice import OF_SECONDS
from mmpack.parity.causes.pair import Hit, Pair, Side, possible
from mmpack.parity.fixes import UNKNOWN


@dataclass(frozen=True)
class Fit:
    rule: str
    steps: tuple[float, ...]  # positions between temporal patches, of each video, uncut
    offset: int
    rate: float  # positions per second
    recorded: bool  # whether the steps are those of the seconds that the side recorded
    gap: str = ""  # how many more than by the rule follow behind each medium of a kind


_OFFSET = "offset"
MOST_OPTIONS = 64  # of seconds, video by video
MOST_GAP = 2  # what is more may be another thing than a count behind a medium that is off by one


def position_hits(pair: Pair, media: list[Hit], recounted: bool = False) -> list[Hit]:
    """Hits for every part of the fits that differs; none if positions were not recorded or follow from the ids.

    `media`: the hits of the media, from which other temporal steps may follow. `recounted`: an offset says nothing.
    """
    left, right = pair.left.sample.position_ids, pair.right.sample.position_ids
    if left is None or right is None or np.array_equal(left, right):
        return []
    fits = [_fits(pair, side) for side in pair.sides]
    if all(fits):
        pairs = list(product(*fits))
        least = min(_unlike(*fit) for fit in pairs)
        readings = [_fit_hits(pair, media, *fit) for fit in pairs if _unlike(*fit) == least]
        of_media = [hits for hits in readings if any(hit.cause in OF_SECONDS for hit in hits)]
        readings = of_media or readings  # what the media show comes first
        if recounted:
            readings = [[h for h in hits if not h.left.startswith(_OFFSET)] for hits in readings]
            if not readings[0]:
                return []
        return _with_alternatives(readings[0], [hit for hits in readings[1:] for hit in hits])
    if np.array_equal(pair.left.ids, pair.right.ids) and left.shape == right.shape:
        return _plain(pair, fits)
    return []


def _unlike(a: Fit, b: Fit) -> int:
    return (_named(a) != _named(b)) + (a.steps != b.steps) + (a.offset != b.offset)


def _fit_hits(pair: Pair, media: list[Hit], a: Fit, b: Fit) -> list[Hit]:
    hits = []
    if _named(a) != _named(b):
        rules = _named(a), _named(b)
        evidence = f"{_where(pair)}rollout follows {rules[0]}, train follows {rules[1]}"
        hits.append(_hit("position_rule", evidence, *(f"rule {r.replace('`', '')}" for r in rules)))
    if a.steps != b.steps:
        steps = [", ".join(f"{s:g}" for s in fit.steps[:4]) for fit in (a, b)]
        evidence = f"temporal steps that fit: rollout {steps[0]}, train {steps[1]}"
        of_media = [h.cause for h in media if h.cause in OF_SECONDS]
        follows = a.recorded and b.recorded and a.rate == b.rate and of_media
        cause = of_media[0] if follows else "second_per_grid_ts"
        hits.append(_hit(cause, evidence, f"steps {steps[0]}", f"steps {steps[1]}"))
    if a.offset != b.offset:
        hits.append(_shifted(pair, a.offset, b.offset))
    return hits


def _named(fit: Fit) -> str:
    return f"`{fit.rule}`" + (f" with {fit.gap}" if fit.gap else "")


def _where(pair: Pair) -> str:
    """From which token on positions differ; nothing where the ids differ too."""
    left, right = pair.left.sample.position_ids, pair.right.sample.position_ids
    assert left is not None and right is not None
    if not np.array_equal(pair.left.ids, pair.right.ids) or left.shape != right.shape:
        return "by their own ids, "
    start = int(np.argmax((left != right).any(axis=0)))
    return f"positions differ from token {start} on: "


def _with_alternatives(hits: list[Hit], others: list[Hit]) -> list[Hit]:
    """The hits, the first of which also names other causes that fit the positions as well."""
    named = {hit.cause for hit in hits}
    extra = {hit.cause: hit.evidence for hit in others if hit.cause not in named}
    if not extra:
        return hits
    others_fit = "; ".join(f"{cause} is possible too: {why}" for cause, why in extra.items())
    return [replace(hits[0], evidence=f"{hits[0].evidence}; {others_fit}"), *hits[1:]]


def _plain(pair: Pair, fits: list[list[Fit]]) -> list[Hit]:
    """Equal ids, but positions of at least one side fit no rule: an offset of all tokens, or a padded rectangle's."""
    left, right = pair.left.sample.position_ids, pair.right.sample.position_ids
    assert left is not None and right is not None
    offset = np.unique(right - left)
    if len(offset) == 1:
        return [_shifted(pair, 0, int(offset[0]))]
    for k, side in enumerate(pair.sides):
        pad, counted = _padding(side), (left, right)[k]
        if pad and fits[1 - k] and (counted == np.arange(pad, pad + len(side))).all():
            return [_shifted(pair, *((pad, 0) if k == 0 else (0, pad)))]
    evidence = "positions fit no known rule in " + " and ".join(
        side.name for side, found in zip(pair.sides, fits, strict=True) if not found
    )
    return [_hit(UNKNOWN, evidence, "other positions", "other positions")]


def _shifted(pair: Pair, a: int, b: int) -> Hit:
    """An offset of all positions: that of the padding that was recorded, or of something else that came before."""
    evidence = f"positions are {abs(b - a)} {'higher' if b > a else 'lower'} in train throughout"
    pads = [
        f"{side.name} {side.sample.metadata['padding']}" for side in pair.sides if _padded(side)
    ]
    if pads:
        evidence += f"; padding [left, right]: {', '.join(pads)}"
    known = [_padding(side) for side in pair.sides]
    counted = [{0, pad} for pad in known]
    shown = f"{_OFFSET} {a}", f"{_OFFSET} {b}"
    if any(known) and any(y - x == b - a for x in counted[0] for y in counted[1]):
        return _hit("padding_positions", evidence, *shown)
    why = "that is not the padding" if pads else "no padding was recorded"
    others = "or they go on from another row, or count from another number"
    causes = possible("padding_positions")
    return _hit(UNKNOWN, f"{evidence}; {why}: {others}; {causes}", *shown)


def _padded(side: Side) -> bool:
    return isinstance(side.sample.metadata.get("padding"), list)


def _padding(side: Side) -> int:
    """Padding that reading cut off the left."""
    padding = side.sample.metadata.get("padding")
    return padding[0] if isinstance(padding, list) and padding and type(padding[0]) is int else 0


def _fits(pair: Pair, side: Side) -> list[Fit]:
    """Every rule, temporal step and offset under which the side's positions come out."""
    recorded, media = side.sample.position_ids, side.sample.media
    if recorded is None or recorded.size == 0:
        return []
    if any(o.media_index >= len(media) for o in side.occurrences):
        return []
    given = grids_of_media([media[o.media_index] for o in side.occurrences])
    rates, seconds = _rates(pair, side), _seconds(pair, side)
    if side.family.tokens_per_second is None or not given["video_grid_thw"]:
        rates, seconds = rates[:1], [()]
    each = [dict.fromkeys((s, s / 2, s * 2, 1.0)) for s in seconds[0]]
    halves = list(islice(product(*each), MOST_OPTIONS))
    for options, gaps in ((seconds, False), (halves, False), (seconds, True)):
        if found := _fits_of(side, given, rates, options, seconds[0], gaps):
            return found
    return []


def _fits_of(
    side: Side,
    given: dict[str, Any],
    rates: list[float],
    options: list[tuple[float, ...]],
    recorded_seconds: tuple[float, ...],
    gaps: bool,
) -> list[Fit]:
    """The fits of some options of seconds. `gaps`: with another number of positions behind each medium of a kind."""
    recorded = side.sample.position_ids
    assert recorded is not None
    out = []
    for rule, rate, option in product(side.family.position_rules, rates, dict.fromkeys(options)):
        try:
            wanted, _ = mrope_positions(
                side.ids,
                side.family,
                **given | {"second_per_grid_ts": option or None},
                rule=rule,
                tokens_per_second=rate,
            )
        except MmpackError:
            return []  # runs and grids contradict each other: a rule names it
        offset = int(recorded[0, 0] - wanted[0, 0])
        gap = _gap(side, recorded - wanted - offset) if gaps else ""
        if gap or np.array_equal(recorded - offset, wanted):
            steps = tuple(float(np.float32(rate) * np.float32(s)) for s in option)
            out.append(Fit(rule, steps, offset, rate, option == recorded_seconds, gap))
    return out


def _gap(side: Side, by: np.ndarray) -> str:
    """Describe `by`, int [rows, L]: one number of positions behind videos, images or both; empty for all else."""
    if (by != by[0]).any():
        return ""
    gained = np.diff(by[0])
    media = side.sample.media
    kinds = [(o.stop, media[o.media_index].modality) for o in side.occurrences]
    for modality in ("video", "image", "medium"):
        stops = [stop for stop, kind in kinds if modality in (kind, "medium")]
        for behind in (0, 1):  # the id that closes it has the place by the rule, or not
            at = [stop + behind - 1 for stop in stops if stop + behind - 1 < len(gained)]
            more = gained[at][gained[at] != 0]
            if not len(more) or np.count_nonzero(gained) != len(more):
                continue
            if (more == more[0]).all() and abs(more[0]) <= MOST_GAP:
                which = "each" if len(more) == len(at) else f"{len(more)} of {len(at)}"
                return f"{more[0]:+d} behind {which} {modality}"
    return ""


def _rates(pair: Pair, side: Side) -> list[float]:
    """Positions per second that may have been used, each once."""
    rates = [s.setting("tokens_per_second") for s in pair.sides]
    rates += [side.family.tokens_per_second, 2.0, 4.0]
    return list(dict.fromkeys(float(r) for r in rates if type(r) in (int, float) and r > 0))


def _seconds(pair: Pair, side: Side) -> list[tuple[float, ...]]:
    """Seconds of each video's patches: recorded on this side, recorded on the other, not passed on (1.0)."""
    other = pair.right if side is pair.left else pair.left
    media = side.sample.media
    videos = [o.media_index for o in side.occurrences if media[o.media_index].modality == "video"]
    out = []
    for owner in (side, other):
        known = [m.second_per_grid_ts for m in owner.sample.media]
        of = [known[i] if i < len(known) else None for i in videos]
        out.append(tuple(1.0 if s is None else s for s in of))
    return [*out, (1.0,) * len(videos)]


def _hit(cause: str, evidence: str, left: str, right: str) -> Hit:
    return Hit(cause, "position_ids", evidence, left, right)
