"""Bars of a drift by axis: the mean |train − rollout| of each group, on one logarithmic scale for all axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mmpack.parity.drift_axes import COLUMNS
from mmpack.view.tags import Markup, joined, table, tag

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift

WIDE, HIGH = 160, 10  # of a bar, in its own units
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


def drift_section(drift: LogprobDrift, note: str) -> Markup:
    """Figures, what they suggest, and a table with bars for each axis of more than one group. `note`: of what."""
    if not drift.axes:
        return Markup("")
    scale = Scale(drift)
    parts = [
        tag("h2", "Drift of logprobs, told apart"),
        *(tag("p", sentence) for sentence in drift.sentences),
        tag("p", f"{note}; {scale}", class_="mm-note"),
    ]
    for name, axis in drift.axes.items():
        if len(axis.groups) < 2:
            continue
        rows = []
        for group in axis.groups:
            shown, *figures = group.row
            rows.append((shown, _bar(scale.length(group.mean_abs), group.mean_abs), *figures))
        head = (COLUMNS[0], "", *COLUMNS[1:])
        parts += [tag("h3", f"by {name}"), table(head, rows)]
        if axis.suggests:
            parts.append(tag("p", axis.suggests, class_="mm-note"))
    return joined(parts)


def _bar(length: float, mean: float) -> Markup:
    return tag(
        "svg",
        tag("rect", width=f"{length * WIDE:.2f}", height=HIGH),
        view_box=f"0 0 {WIDE} {HIGH}",
        class_="mm-bar",
        role="img",
        aria_label=f"mean drift {mean:.3g}",
    )
