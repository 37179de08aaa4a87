"""Drawings of boxes, and histograms of counts, as SVG that takes its colours from the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.view.tags import Markup, joined, tag

WIDTH = 1000.0  # of every drawing, in its own units
BARS = 16  # of a histogram, at most


def histogram(values: Sequence[int], what: str) -> Markup:
    """Bars of how many of `values` lie in each of at most BARS equal ranges."""
    if not len(values):
        return tag("p", f"no {what}", class_="mm-note")
    low, high = min(values), max(values)
    count, edges = np.histogram(values, bins=min(BARS, high - low + 1), range=(low, high + 1))
    width, most = WIDTH / len(count), max(count.max(), 1)
    bars = []
    for k, n in enumerate(count.tolist()):
        first, last = int(np.ceil(edges[k])), int(np.ceil(edges[k + 1])) - 1
        height = 60.0 * n / most
        about = tag("title", f"{n} of {first:,} to {last:,}")
        shape = {"x": f"{k * width:.1f}", "y": f"{60 - height:.1f}", "height": f"{height:.1f}"}
        bars.append(
            tag(
                "rect",
                about,
                class_="mm-image",
                fill="currentColor",
                width=f"{width - 2:.1f}",
                **shape,
            )
        )
    middle = int(np.median(values))
    said = f"{what}: {low:,} to {high:,}, half of them up to {middle:,}; the highest bar is {most}"
    bars_ = tag("div", drawing(bars, 60.0, said), class_="wide")
    return joined([bars_, tag("p", said, class_="mm-note")])


def drawing(boxes: list[Markup], height: float, label: str) -> Markup:
    """Boxes in WIDTH by `height` units, as wide as the page; `label`: for who can't see them."""
    return tag(
        "svg",
        *boxes,
        view_box=f"0 0 {WIDTH:.0f} {height:.0f}",
        preserveAspectRatio="none",
        width="100%",
        height=f"{height:.0f}",
        class_="mm-forest",
        role="img",
        aria_label=label,
    )
