"""What a text says of places: boxes and points between markers, in JSON, and plain. Indices are of characters.

Every parser reads a text once, from left to right, without recursion: what a policy writes may be anything.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from mmpack.grounding.text.json_text import read_json
from mmpack.grounding.text.markers import read_markers
from mmpack.grounding.text.places import Malformed, Place
from mmpack.grounding.text.plain import read_plain

__all__ = ["FORMS", "Malformed", "Place", "read_places"]

_READERS = {"markers": read_markers, "json": read_json, "plain": read_plain}
FORMS = tuple(_READERS)


def read_places(text: str, forms: tuple[str, ...] = FORMS) -> list[Place | Malformed]:
    """All places of `text`, and what looks like one and can't be read, in order of their start.

    `forms`: which of `FORMS` are read, always in that order; a later one reads only what no earlier one took.
    """
    found: list[Place | Malformed] = []
    for form in FORMS:
        if form in forms:
            taken = sorted((x.start, x.stop) for x in found)
            starts = [start for start, _ in taken]
            stops = list(accumulate((stop for _, stop in taken), max))
            places, faults = _READERS[form](text)
            read: list[Place | Malformed] = [*places, *faults]
            found += [x for x in read if _free(x, starts, stops)]
    return sorted(found, key=lambda x: (x.start, x.stop))


def _free(found: Place | Malformed, starts: list[int], stops: list[int]) -> bool:
    """Whether no taken range overlaps it. `starts` are sorted, `stops[k]` is the last end of ranges 0 to k."""
    before = bisect_left(starts, found.stop) - 1
    return before < 0 or stops[before] <= found.start
