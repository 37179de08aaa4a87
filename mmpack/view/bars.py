"""Small figures of numbers: histograms, and bars of what is saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mmpack.schema.spans import Cost, Score
from mmpack.view.parts import Box, Drawing, Figure, Grid, Heading, Part, Shape, Stroke, Table, Word

BARS = 16  # of a histogram, at most
EXACT = 2**52  # of whole numbers below it, edges of bins are exact in float64
WIDTH, HIGH, FOOT = 210.0, 60.0, 18.0  # of a histogram: its bars, and the words below

Saved = tuple[str, int, int]  # a name, its count of each sample alone, and its count here


def histogram(values: Sequence[int] | Sequence[float] | np.ndarray, title: str) -> Figure:
    """How many of `values` lie in each of at most BARS equal ranges; NaN and infinities are counted separately."""
    given = np.asarray(values)
    whole_numbers = given.dtype == object or given.dtype.kind in "iu"
    if whole_numbers and (np.abs(given.astype(np.float64)) >= EXACT).any():  # of a damaged grid
        given = given.astype(np.float64)
    found = given[np.isfinite(given)]
    left_out = f"; {len(given) - len(found):,} not finite" if len(found) < len(given) else ""
    if not len(found):
        return Figure(title, Drawing([], HIGH + FOOT, f"no {title}", WIDTH), f"no values{left_out}")
    whole = np.issubdtype(found.dtype, np.integer)
    low, high = found.min().item(), found.max().item()
    if low == high:
        return _constant(title, len(found), low, left_out)
    count, edges = _counts(found, low, high, whole)
    wide, most = WIDTH / len(count), int(count.max())
    shapes: list[Shape] = []
    for k, n in enumerate(count.tolist()):
        about = f"{n} of {_range(edges[k], edges[k + 1], whole)}"
        size = HIGH * n / most
        shapes.append(Box(k * wide, HIGH - size, max(wide - 1.5, 0.5), size, "mm-image", about))
    shapes.append(Stroke(0, HIGH, WIDTH, HIGH))
    shapes.append(Word(0, HIGH + 14, said(low), "mm-soft"))
    shapes.append(Word(WIDTH, HIGH + 14, said(high), "mm-soft", "end"))
    middle = int(np.median(found)) if whole else np.median(found).item()
    caption = f"{_values(len(found))}, median {said(middle)}, tallest bar {most:,}"
    label = f"{title}: {caption}, from {said(low)} to {said(high)}"
    return Figure(title, Drawing(shapes, HIGH + FOOT, label, WIDTH), caption + left_out)


def _values(count: int) -> str:
    return f"{count:,} value{'s' if count != 1 else ''}"


def _constant(title: str, count: int, value: float, left_out: str) -> Figure:
    """One bar in the middle."""
    caption = f"{_values(count)}, all {said(value)}"
    middle, wide = WIDTH / 2, WIDTH / BARS
    shapes: list[Shape] = [
        Box(middle - wide / 2, 0, wide, HIGH, "mm-image", f"{count} of {said(value)} to {said(value)}"),
        Stroke(0, HIGH, WIDTH, HIGH),
        Word(middle, HIGH + 14, said(value), "mm-soft", "middle"),
    ]  # fmt: skip
    drawing = Drawing(shapes, HIGH + FOOT, f"{title}: {caption}", WIDTH)
    return Figure(title, drawing, caption + left_out)


def saved_parts(saved: Sequence[Saved], here: str, level: int = 2) -> list[Part]:
    """What is left of each count, within what each sample alone would take; `here`: the name of a column."""
    found = []
    for name, alone, count in saved:
        most = max(alone, count, 1)
        about = f"{name}, each sample alone: {alone:,}"
        shapes = [
            Box(0, 0, WIDTH * alone / most, 14, "mm-room", about),
            Box(0, 0, WIDTH * count / most, 14, "mm-image", f"{name} here: {count:,}"),
        ]
        label = f"{name}: {count:,}, of each sample alone {alone:,}"
        found.append(Figure(name, Drawing(shapes, 14, label, WIDTH), f"{count:,} of {alone:,}"))
    rows = [
        (name, f"{alone:,}", f"{count:,}", f"{1 - count / alone:.1%}" if alone else "–")
        for name, alone, count in saved
    ]
    title = Heading("What is repeated, and what sharing saves", level)
    return [title, Grid(found), Table(("what", "each sample alone", here, "saved"), rows)]


def score_histograms(scores: Iterable[tuple[str, Score | Cost]]) -> list[Figure]:
    """A histogram of each kind and name."""
    named: dict[str, list[float]] = {}
    for kind, score in scores:
        named.setdefault(f"{kind} {score.name}", []).append(score.value)
    return [histogram(values, name) for name, values in named.items()]


def said(value: float) -> str:
    """A count in full, another number in four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _counts(
    values: np.ndarray, low: float, high: float, whole: bool
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k] and the edges [k + 1]; of whole numbers a range holds as many as another, or one fewer."""
    if whole:
        bins = int(min(BARS, high - low + 1))
        return np.histogram(values, bins=bins, range=(low, high + 1))
    with np.errstate(over="ignore"):
        span = np.float64(high) - np.float64(low)
    if not np.isfinite(span) or (np.diff(np.linspace(low, high, BARS + 1)) <= 0).any():
        # too far apart, or too near, for equal ranges
        return np.array([len(values)]), np.array([low, high])
    return np.histogram(values.astype(np.float64), bins=BARS, range=(low, high))


def _range(start: float, stop: float, whole: bool) -> str:
    if not whole:
        return f"{start:.4g} to {stop:.4g}"
    return f"{int(np.ceil(start)):,} to {int(np.ceil(stop)) - 1:,}"
