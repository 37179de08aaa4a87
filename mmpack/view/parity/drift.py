"""Bars of a drift by axis: the mean |train − rollout| of each group, on one logarithmic scale for all axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mmpack.parity.drift_axes import COLUMNS
from mmpack.view.parts import Box, Drawing, Heading, Line, Part, Table

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


def drift_parts(
    drift: LogprobDrift, note: str, title: str = "Drift of logprobs, told apart"
) -> list[Part]:
    """Figures, what they suggest, and a table with bars for each axis of more than one group. `note`: of what."""
    if not drift.axes:
        return []
    scale = Scale(drift)
    parts: list[Part] = [
        Heading(title),
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
