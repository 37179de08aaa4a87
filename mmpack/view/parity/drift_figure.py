"""A drift by axis as a figure for a paper: a PNG of bars, with what they suggest. Units of half a pixel's width."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from mmpack.view.parity.drift_bars import Scale
from mmpack.view.trace.drawing import Sheet

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift

WIDTH, MARGIN, LINE, BAR = 1080, 36, 24, 14
NAMES, FIGURES = 250, 330  # widths of the columns beside the bars
PAPER, INK, SOFT, RULE, FILL, MARKED = (
    "#ffffff", "#1b2129", "#56616d", "#d8dee5", "#5b8def", "#c2410c"
)  # fmt: skip


def drift_figure(drift: LogprobDrift, title: str) -> bytes:
    """The PNG. Raises: ArgumentError for a figure that is too high, MissingExtraError without Pillow."""
    sheet, scale = Sheet(WIDTH, PAPER), Scale(drift)
    right = WIDTH - MARGIN
    sheet.text(MARGIN, MARGIN - 8, title, 22, INK)
    sheet.y = MARGIN + 28
    for sentence in drift.sentences:
        for part in sheet.wrapped(sentence.replace("Δ", "d"), 14, right - MARGIN, 4):
            sheet.text(MARGIN, sheet.y, part, 14, INK)
            sheet.y += LINE - 4
    sheet.text(MARGIN, sheet.y + 2, str(scale).replace("Δ", "d"), 12, SOFT)
    sheet.y += LINE
    left, stop = MARGIN + NAMES, right - FIGURES
    for name, axis in drift.axes.items():
        if len(axis.groups) < 2:
            continue
        sheet.rule(MARGIN, right, sheet.y, RULE)
        sheet.y += 8
        sheet.text(MARGIN, sheet.y, f"by {name}", 16, INK)
        heads = ("tokens", 0), ("mean |d|", 90), ("max |d|", 170), ("ESS", 250)
        for head, at in heads:
            sheet.text(stop + 16 + at, sheet.y + 2, head, 12, SOFT)
        sheet.y += LINE
        stands = axis.suggests and not axis.suggests.startswith("stands")
        for group in axis.groups:
            shown = sheet.wrapped(group.name, 14, NAMES - 12, 1)[0]
            sheet.text(MARGIN, sheet.y - 2, shown, 14, INK)
            end = left + scale.length(group.mean_abs) * (stop - left)
            fill = MARKED if stands else FILL
            sheet.box((left, sheet.y, stop, sheet.y + BAR), None, RULE)
            if end > left:
                sheet.box((left, sheet.y, end, sheet.y + BAR), fill, None)
            values = (
                f"{group.tokens:,}",
                f"{group.mean_abs:.1e}",
                f"{group.max_abs:.1e}",
                f"{group.ess:.1%}",
            )
            for (_, at), value in zip(heads, values, strict=True):
                sheet.text(stop + 16 + at, sheet.y - 1, value, 13, INK)
            sheet.y += LINE - 2
        sheet.y += 6
    out = io.BytesIO()
    sheet.image(sheet.y + MARGIN - 12).save(out, "PNG")
    return out.getvalue()
