"""Bars of a drift by axis: the mean |train − rollout| of each group, on one logarithmic scale for all axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mmpack.parity.causes.pair import Pair
from mmpack.parity.drift_axes import COLUMNS
from mmpack.parity.drift_traces import CARRIED, unlike_logprobs
from mmpack.view.parts import WIDE, Box, Drawing, Heading, Line, Part, Shape, Stroke, Table

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift

WIDTH, HIGH = 160, 10  # of a bar, in its own units
DECADES = 6  # of the scale at most


class Scale:
    """Length of a bar from 0 to 1; `low` and `high` are powers of ten around all means that are not 0."""

    def __init__(self, drift: LogprobDrift) -> None:
        means = [group.mean_abs for axis in drift.axes.values() for group in axis.groups]
        means = [mean for mean in means if mean > 0] or [1.0]
        self.high = math.ceil(math.log10(max(means)) + 1e-9)
        self.low = max(min(math.floor(math.log10(min(means))), self.high - 1), self.high - DECADES)

    def length(self, mean: float) -> float:
        if mean <= 0:
            return 0.0
        share = (math.log10(mean) - self.low) / (self.high - self.low)
        return min(max(share, 0.005), 1.0)

    def __str__(self) -> str:
        return f"bars: mean |Δ| from 1e{self.low} to 1e{self.high}, logarithmic"


def drift_parts(drift: LogprobDrift, note: str) -> list[Part]:
    """Figures, what they suggest, and a table with bars for each axis of more than one group. `note`: of what."""
    if not drift.axes:
        return []
    scale = Scale(drift)
    parts: list[Part] = [
        Heading("Drift of logprobs, told apart"),
        *map(Line, drift.sentences),
        Line(f"{note}; {scale}", soft=True),
    ]
    for name, axis in drift.axes.items():
        if len(axis.groups) < 2:
            continue
        stands = bool(axis.suggests) and not axis.suggests.startswith("stands")
        rows = []
        for group in axis.groups:
            shown, *figures = group.row
            rows.append(
                (shown, _bar(scale.length(group.mean_abs), group.mean_abs, stands), *figures)
            )
        parts += [Heading(f"by {name}", 3), Table((COLUMNS[0], "", *COLUMNS[1:]), rows)]
        if axis.suggests:
            parts.append(Line(axis.suggests, soft=True))
    return parts


def drift_figure(drift: LogprobDrift, title: str) -> list[Part]:
    """The same by itself, under a title; its figures where no axis has groups."""
    whole = drift_parts(drift, "all samples handed in")[1:] or [*map(Line, drift.sentences)]
    return [Heading(title, 1), *whole]


def _bar(length: float, mean: float, stands: bool) -> Drawing:
    box = Box(0, 0, length * WIDTH, HIGH, "mm-down" if stands else "mm-up")
    return Drawing([box], HIGH, f"mean drift {mean:.3g}", WIDTH, fixed=True, style="mm-bar")


HEIGHT = 90  # of the drawing, in its own units
BARS = 500


def drift_of(pair: Pair, train_logprobs: np.ndarray | None) -> np.ndarray | str | None:
    """The drift of a pair's loss tokens, float64 [n]; a text that says why there is none; None without logprobs.

    `train_logprobs` [n]: the trainer's, where its trace doesn't hold them.
    """
    mine = pair.left.sample.rollout_logprobs
    other = pair.right.sample.rollout_logprobs if train_logprobs is None else train_logprobs
    if mine is None or other is None:
        return None
    left, right = (side.sample for side in pair.sides)
    if why := unlike_logprobs(left, right, train_logprobs):
        return f"{why}: not compared"
    if train_logprobs is None and np.array_equal(mine, other):
        return f"{CARRIED}: not compared"
    return np.asarray(other, dtype=np.float64) - np.asarray(mine, dtype=np.float64)


def by_token(drift: np.ndarray) -> list[Part]:
    """One bar per loss token; of more than BARS, the largest of each bin."""
    tokens = np.flatnonzero(np.isfinite(drift))
    if not len(tokens):
        return [Line("no finite logprob", soft=True)]
    bins = np.array_split(tokens, min(len(tokens), BARS))
    largest = [int(b[np.argmax(np.abs(drift[b]))]) for b in bins]
    bars = drift[largest]
    top = float(np.abs(bars).max()) or 1.0
    step, middle = WIDE / len(bars), HEIGHT / 2
    shapes: list[Shape] = []
    for i, value in enumerate(bars):
        length = abs(value) / top * (middle - 2)
        about = f"loss token {largest[i]}: {value:+.4g}" if len(bars) <= BARS // 4 else ""
        y, style = (middle - length, "mm-up") if value > 0 else (middle, "mm-down")
        shapes.append(Box(i * step, y, max(step * 0.8, 0.6), max(length, 0.4), style, about))
    shapes.append(Stroke(0, middle, WIDE, middle))
    drawing = Drawing(
        shapes, HEIGHT, "train minus rollout logprob, by loss token", style="mm-drift"
    )
    note = f"train − rollout logprob, {len(drift)} loss tokens; full height {top:.3g}"
    return [drawing, Line(note, soft=True)]
