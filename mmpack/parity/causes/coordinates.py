"""Boxes and points of one side that are the other's in another coordinate system, or bear another one's name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

from mmpack.grounding.coordinates import SYSTEMS, Sizes, sizes_of
from mmpack.parity.causes.pair import Hit, Pair, show
from mmpack.schema.sample import Sample

FIELDS = ("bbox_targets", "point_targets", "region_spans")
CAUSE = "coordinate_system"
_UNITS = {"normalized_1": 0.01}  # by how much rounding may move a number; 1 in the other systems
_TELLING = 20  # units: what is smaller fits any system
_ENOUGH = 2  # numbers that tell

# of one entry: its index, its numbers on both sides, the sizes of its picture on both sides
Entry = tuple[int, np.ndarray, np.ndarray, tuple[Sizes, Sizes]]


def coordinate_hits(pair: Pair) -> list[Hit]:
    """A hit of each field that another convention explains, and of `coordinate_system` where both recorded others."""
    one, two = (side.sample.coordinate_system for side in pair.sides)
    hits = [hit for name in FIELDS if (hit := _numbers_hit(pair, name, one, two))]
    if one is not None and two is not None and one != two:
        evidence = (
            f"coordinate_system: rollout {one}, train {two}; {_meaning(pair, hits, one, two)}"
        )
        hits.append(Hit(CAUSE, CAUSE, evidence, show(one), show(two)))
    return hits


def _numbers_hit(pair: Pair, name: str, one: str | None, two: str | None) -> Hit | None:
    entries = list(_entries(pair, name))
    unlike = [e for e in entries if not _close(e[1], e[2], 1e-6)]  # equal ones may be as they were
    if not unlike:
        return None
    # where media are resized to other sizes, a size that is another one's original says nothing
    resized = any(sizes[0].model != sizes[1].model for *_, sizes in entries)
    systems = [s for s in SYSTEMS if s != "original_pixels" or not resized]
    for source, target in permutations(systems, 2):
        # what is recorded of a side holds for the left, or for the right, or for neither if both name one system
        if None not in (one, two) and source != one and target != two:
            continue
        if _fits(entries, source, target) or _fits(unlike, source, target):
            at, a, b, _ = unlike[0]
            called = f"; rollout calls them {one or 'nothing'}, train {two or 'nothing'}"
            some = "" if len(unlike) == len(entries) else f" ({len(unlike)} of {len(entries)})"
            evidence = (
                f"{name}{some} of train are those of rollout, from {source} to {target}{called}"
            )
            left, right = (f"{name}[{at}] {tuple(x.tolist())}" for x in (a, b))
            span = None
            if name == "region_spans":
                region = (pair.left.sample.region_spans or [])[at]
                span = (region.start, region.stop)
            return Hit(CAUSE, name, evidence, left, right, index=at, span=span)
    return None


def _meaning(pair: Pair, hits: list[Hit], one: str, two: str) -> str:
    if any(f"from {one} to {two}" in hit.evidence for hit in hits):
        return "the same places in both"
    entries = [entry for name in FIELDS for entry in _entries(pair, name)]
    if not entries:
        return "neither holds a box or point that both have"
    if all(_close(a, b, 1e-6) for _, a, b, _ in entries):
        return "their numbers are equal, so that one side calls them by a wrong name"
    return "their numbers are not the same places"


def _entries(pair: Pair, name: str) -> Iterator[Entry]:
    """The entries that both sides have, with as many numbers each; none where the lists can't be paired."""
    lists = [getattr(side.sample, name) or [] for side in pair.sides]
    if len(lists[0]) != len(lists[1]):
        return
    for i, items in enumerate(zip(*lists, strict=True)):
        a, b = (_numbers(item) for item in items)
        if not len(a) or len(a) != len(b):
            continue
        first, second = (
            _sizes(side.sample, item) for side, item in zip(pair.sides, items, strict=True)
        )
        yield i, a, b, (first, second)


def _numbers(item: Any) -> np.ndarray:
    parts = [v for n in ("bbox", "point") if (v := getattr(item, n, None)) is not None]
    return np.array([x for part in parts for x in part], np.float64)


def _sizes(sample: Sample, item: Any) -> Sizes:
    index = item.media_index
    return sizes_of(sample, index if index is None or index < len(sample.media) else None)


def _fits(entries: list[Entry], source: str, target: str) -> bool:
    """Whether the right numbers are the left ones, from `source` to `target`, and numbers show that they moved."""
    telling = 0
    for _, a, b, sizes in entries:
        sides = sizes[0].side(source), sizes[1].side(target)
        if sides[0] is None or sides[1] is None:
            return False
        factor = np.tile(np.array(sides[1]) / np.array(sides[0]), len(a) // 2)
        units = _UNITS.get(source, 1.0) * factor, _UNITS.get(target, 1.0)
        unit = np.maximum(*np.broadcast_arrays(*units))  # either side may have been rounded
        with np.errstate(over="ignore"):
            near = np.abs(a * factor - b) <= unit
        if not near.all():
            return False
        telling += int((np.abs(b - a) > _TELLING * np.minimum(unit, 1.0)).sum())
    return telling >= _ENOUGH


def _close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance))
