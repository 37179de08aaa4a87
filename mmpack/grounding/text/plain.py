"""Points `(x, y)` or `[x, y]`, and boxes `[x0, y0, x1, y1]`, that nothing else marks."""

from __future__ import annotations

import re

from mmpack.grounding.text.places import DIGITS, Malformed, Place, unlike_finite, value_of

# no bracket is within: each character is read once more at most
_TWO = rf"\s*+({DIGITS})\s*+,\s*+({DIGITS})\s*+"
_PLAIN = re.compile(rf"[(\[]{_TWO}(?:,{_TWO})?+[)\]]")


def read_plain(text: str) -> tuple[list[Place], list[Malformed]]:
    """Places and faults, see `read_places`. Three numbers, or words between them, are no place."""
    places: list[Place] = []
    wrong: list[Malformed] = []
    for found in _PLAIN.finditer(text):
        if (found[0][0] == "(") != (found[0][-1] == ")"):
            continue
        groups = [k for k in (1, 2, 3, 4) if found[k] is not None]
        values = tuple(value_of(found[k]) for k in groups)
        if why := unlike_finite(values):
            wrong.append(Malformed(*found.span(), why))
            continue
        bbox, point = (values, None) if len(values) == 4 else (None, values)
        numbers = tuple(found.span(k) for k in groups)
        places.append(Place(*found.span(), "plain", bbox, point, None, numbers))
    return places, wrong
