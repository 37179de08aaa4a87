"""The loss tokens [n] of all samples, one after the other, and the groups that each of them is in.

A group is a code from 0 into its axis' names. Token indices count from 0 in their sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.schema.spans import MODALITIES

BINS = 8  # of position and length, of about as many tokens each
MOST = 16  # groups of turns, of versions
# bit 0: images, bit 1: video, bit 2: audio
KINDS = (
    *("text only", "images", "video", "images and video"),
    *("audio", "images and audio", "video and audio", "images, video and audio"),
)
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Axis:
    """`names` of the groups; `of` int64 [n]: the group of each token. `ordered`: the groups are in an order.

    `loose`: the group of tokens that nothing is known of, if there is one.
    """

    names: tuple[str, ...]
    of: np.ndarray
    ordered: bool = False
    loose: int | None = None


def axes_of(samples: Sequence[Sample], near: int) -> tuple[np.ndarray, dict[str, Axis]]:
    """The sample of each token, int64 [n], and the axes by name. `near`: tokens that count as close to a medium."""
    owner = [(k, span) for k, sample in enumerate(samples) for span in sample.loss_spans]
    lengths = np.array([len(s) for s in samples], np.int64)
    sample = np.array([k for k, _ in owner], np.int64)
    start = np.array([span.start for _, span in owner], np.int64)
    stop = np.minimum(np.array([span.stop for _, span in owner], np.int64), lengths[sample])
    count = np.maximum(stop - start, 0)
    spans = np.repeat(np.arange(len(owner)), count)
    first = np.cumsum(count) - count
    position = np.arange(len(spans)) + (start - first)[spans]
    goes_on = np.append(False, (sample[1:] == sample[:-1]) & (start[1:] == stop[:-1]))
    response = start[np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(owner))))]
    turns = [samples[k].turn if span.turn is None else span.turn for k, span in owner]
    of = sample[spans]
    base = np.cumsum(lengths + 1) - lengths - 1  # each sample's first place among all tokens
    at = position + base[of]
    return of, {
        "modality": _modality(samples, of),
        "medium": _medium(samples, base, of, at, near),
        "position": _bins(position),
        "response": _bins(position - response[spans]),
        "length": _bins(lengths[of]),
        "turn": _named(turns, spans, _turn_names, last=True),
        "version": _version(samples, base, of, at),
    }


def _modality(samples: Sequence[Sample], of: np.ndarray) -> Axis:
    bits = {"image": 1, "video": 2, "audio": 4}
    kinds = [sum({bits.get(span.modality, 0) for span in s.modality_spans}) for s in samples]
    return Axis(KINDS, np.array(kinds, np.int64)[of])


def _medium(
    samples: Sequence[Sample], base: np.ndarray, of: np.ndarray, at: np.ndarray, near: int
) -> Axis:
    """By the last medium before each token."""
    media = [
        (k, span)
        for k, sample in enumerate(samples)
        for span in sorted(sample.modality_spans, key=lambda span: span.stop)
    ]
    stops = np.array([base[k] + min(span.stop, len(samples[k])) for k, span in media], np.int64)
    kind = np.array([MODALITIES.index(span.modality) for _, span in media], np.int64)
    whose = np.array([k for k, _ in media], np.int64)
    has = np.isin(np.arange(len(samples)), whose)[of].astype(np.int64)
    names = ("no medium", "before a medium", *_after(near))
    if not media:
        return Axis(names, has)
    last = np.searchsorted(stops, at, side="right") - 1
    after = (last >= 0) & (whose[last] == of)
    far = (at - stops[last] >= near).astype(np.int64)
    return Axis(names, np.where(after, 2 + 2 * kind[last] + far, has))


def _after(near: int) -> tuple[str, ...]:
    kinds = ("an image", "a video", "an audio")
    return tuple(
        text for kind in kinds for text in (f"up to {near} after {kind}", f"later after {kind}")
    )


def _bins(values: np.ndarray) -> Axis:
    """Whole numbers in at most BINS bins that hold about as many tokens each."""
    below = np.cumsum(np.bincount(values))
    wanted = np.arange(1, BINS) * len(values) / BINS
    edges = np.unique(np.searchsorted(below, wanted) + 1)
    edges = edges[(edges > values.min()) & (edges <= values.max())]
    lows = [int(values.min()), *edges.tolist()]
    highs = [*(edges - 1).tolist(), int(values.max())]
    names = tuple(str(a) if a == b else f"{a} to {b}" for a, b in zip(lows, highs, strict=True))
    return Axis(names, np.searchsorted(edges, values, side="right"), ordered=True)


Names = Callable[[Sequence[str | int]], tuple[list[str | int], bool]]


def _named(given: Sequence[str | int | None], of: np.ndarray, order: Names, last: bool) -> Axis:
    """Values by name. Of more than MOST, those at the end are one group if `last`, else those at the beginning."""
    known, ordered = order([v for v in dict.fromkeys(given) if v is not None])
    more = max(len(known) - MOST, 0)
    together = known[len(known) - more :] if last else known[:more]
    alone = [v for v in known if v not in together]
    name = f"{more} {'others' if not ordered else 'later' if last else 'earlier'}"
    groups = [[v] for v in alone]
    names = [str(v) for v in alone]
    if together:
        at = len(alone) if last else 0
        groups.insert(at, together)
        names.insert(at, name)
    code: dict[str | int | None, int] = {v: k for k, group in enumerate(groups) for v in group}
    loose = len(names) if None in given else None
    if loose is not None:
        code[None] = loose
        names.append(NOT_RECORDED)
    return Axis(tuple(names), np.array([code[v] for v in given], np.int64)[of], ordered, loose)


def _turn_names(values: Sequence[str | int]) -> tuple[list[str | int], bool]:
    return sorted(values), True


def _version_names(values: Sequence[str | int]) -> tuple[list[str | int], bool]:
    """By number where all names are numbers; else as they came, in no order."""
    if all(str(v).isascii() and str(v).isdigit() for v in values):
        return sorted(values, key=lambda v: (int(v), str(v))), True
    return list(values), False


def _version(samples: Sequence[Sample], base: np.ndarray, of: np.ndarray, at: np.ndarray) -> Axis:
    rows = [
        (k, v)
        for k, sample in enumerate(samples)
        for v in sorted(sample.policy_versions or (), key=lambda v: v.start)
    ]
    if not rows:
        return Axis((NOT_RECORDED,), np.zeros(len(of), np.int64), loose=0)
    starts = np.array([base[k] + v.start for k, v in rows], np.int64)
    stops = np.array([base[k] + min(v.stop, len(samples[k])) for k, v in rows], np.int64)
    last = np.searchsorted(starts, at, side="right") - 1
    inside = (last >= 0) & (at < stops[last])
    given = [v.version for _, v in rows]
    place = np.where(inside, last, len(rows))
    return _named([*given, None] if not inside.all() else given, place, _version_names, last=False)
