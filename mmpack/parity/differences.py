"""The first place where two lists of spans or records differ. Token indices, half-open spans."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    field: str
    left: str
    right: str
    index: int | None = None
    span: tuple[int, int] | None = None


def of_list(
    field: str,
    a: Sequence[Any],
    b: Sequence[Any],
    same: Callable[[Any, Any], bool],
    parts: Callable[[Any], Mapping[str, Any]],
) -> Difference:
    """The first entries that are not the same; `parts`: name to value, of an entry."""
    both = zip(a, b, strict=False)
    at = next((i for i, (x, y) in enumerate(both) if not same(x, y)), min(len(a), len(b)))
    entries = [parts(x[at]) if at < len(x) else None for x in (a, b)]
    shown = [
        f"{len(x)} {field}" if entry is None else f"{field}[{at}] {described(entry)}"
        for x, entry in zip((a, b), entries, strict=True)
    ]
    first = next(entry for entry in entries if entry is not None)
    span = (first["start"], first["stop"]) if field.endswith("_spans") else None
    return Difference(field, shown[0], shown[1], at, span)


def of_spans(field: str, a: Sequence[Any], b: Sequence[Any], name: str) -> Difference | None:
    """The first tokens that only one side covers, or covers by another `name`; else those of another turn."""
    masks = joined(a, name), joined(b, name)
    if masks[0] != masks[1]:
        return of_list(field, *masks, operator.eq, named("start", "stop", name))
    return of_shared(field, a, b, "turn")


def named(*names: str) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """The `parts` of entries that are tuples."""
    return lambda values: dict(zip(names, values, strict=True))


def described(parts: Mapping[str, Any]) -> str:
    """`[start, stop)` of a span, then name and value of each other part that was recorded."""
    others = [f"{k} {v}" for k, v in parts.items() if v is not None and k not in ("start", "stop")]
    span = [f"[{parts['start']}, {parts['stop']})"] if "start" in parts else []
    return ", ".join([*span, *others])


def joined(spans: Sequence[Any], name: str) -> list[tuple[int, int, Any]]:
    """(start, stop, value of `name`): empty spans left out, touching ones of one value joined."""
    out: list[tuple[int, int, Any]] = []
    for s in spans:
        value = getattr(s, name)
        if s.start == s.stop:
            continue
        if out and out[-1][1] == s.start and out[-1][2] == value:
            out[-1] = (out[-1][0], s.stop, value)
        else:
            out.append((s.start, s.stop, value))
    return out


def overlaps(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The places (i, j) of spans a[i] and b[j], each list sorted and disjoint, that share a token."""
    i = j = 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]
        if max(x.start, y.start) < min(x.stop, y.stop):
            yield i, j
        i, j = i + (x.stop <= y.stop), j + (y.stop <= x.stop)


def of_shared(field: str, a: Sequence[Any], b: Sequence[Any], name: str) -> Difference | None:
    """The first token that spans of both sides share, and of which both recorded another `name`."""
    for places in overlaps(a, b):
        pair = a[places[0]], b[places[1]]
        values = [getattr(s, name) for s in pair]
        if None not in values and values[0] != values[1]:
            shown = [
                f"{field}[{k}] [{s.start}, {s.stop}), {name} {value}"
                for k, s, value in zip(places, pair, values, strict=True)
            ]
            both = max(s.start for s in pair), min(s.stop for s in pair)
            return Difference(field, shown[0], shown[1], places[0], both)
    return None
