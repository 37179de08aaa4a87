"""The first place where two lists of spans or records differ. Token indices, half-open spans."""

from __future__ import annotations

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


def unlike_where_shared(a: Sequence[Any], b: Sequence[Any], name: str) -> tuple[int, int] | None:
    """The spans, by their places, that share the first token of which both sides recorded another `name`."""
    for i, j in overlaps(a, b):
        x, y = getattr(a[i], name), getattr(b[j], name)
        if None not in (x, y) and x != y:
            return i, j
    return None


def at_shared(
    field: str, a: Sequence[Any], b: Sequence[Any], places: tuple[int, int], name: str
) -> Difference:
    """What `unlike_where_shared` found."""
    pair = a[places[0]], b[places[1]]
    shown = [
        f"{field}[{k}] [{s.start}, {s.stop}), {name} {getattr(s, name)}"
        for k, s in zip(places, pair, strict=True)
    ]
    both = max(s.start for s in pair), min(s.stop for s in pair)
    return Difference(field, shown[0], shown[1], places[0], both)
