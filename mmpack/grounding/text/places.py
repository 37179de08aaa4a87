"""A place as a text writes it, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# possessive (`++`): a number is read once, whatever follows it
DIGITS = r"[+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+"
NUMBER = rf"(?:{DIGITS}|[+-]?+(?i:nan|infinity|inf)(?![a-zA-Z]))"

Span = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """A box or a point, or both, of characters [start, stop)."""

    start: int
    stop: int
    form: str  # of `FORMS`
    bbox: tuple[float, ...] | None = None  # x0, y0, x1, y1 as written
    point: tuple[float, ...] | None = None  # x, y as written
    label: str | None = None
    numbers: tuple[Span, ...] = ()  # of each number, those of the box first
    quad: tuple[float, ...] | None = None  # four corners; `bbox` encloses them


@dataclass(frozen=True)
class Malformed:
    """What looks like a place and can't be read."""

    start: int
    stop: int
    why: str


def value_of(text: str) -> float:
    """The number that `NUMBER` matched; infinite where it is too large for a float."""
    return float(text)


def unlike_finite(values: Sequence[float]) -> str | None:
    """Why the values are no coordinates, None if they are finite."""
    for value in values:
        if not math.isfinite(value):
            return f"a coordinate is {value:g}" if math.isnan(value) else "a coordinate is infinite"
    return None
