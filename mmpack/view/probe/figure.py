"""Layer × error as a figure for a paper: a PNG, one line per report. Units of half a pixel's width."""

from __future__ import annotations

import io
from collections.abc import Sequence

from mmpack.probe.report import ProbeReport
from mmpack.view.probe.lines import points, scale_of
from mmpack.view.trace.drawing import Sheet

WIDTH, MARGIN, HIGH, LEFT = 1080, 36, 420, 60
PAPER, INK, SOFT, RULE = "#ffffff", "#1b2129", "#56616d", "#d8dee5"
LINES = ("#c2410c", "#2f6fd6", "#0a7d33", "#8250df", "#a16207", "#0e7490")


def figure(reports: Sequence[ProbeReport], labels: Sequence[str], title: str) -> bytes:
    """The PNG. Raises: MissingExtraError without Pillow."""
    sheet, scale = Sheet(WIDTH, PAPER), scale_of(reports)
    left, right = MARGIN + LEFT, WIDTH - MARGIN
    sheet.text(MARGIN, MARGIN - 8, title, 22, INK)
    sheet.text(
        MARGIN,
        MARGIN + 20,
        "largest error of each module, relative to its row; dashed: what is allowed",
        13,
        SOFT,
    )
    top = MARGIN + 50
    bottom = top + HIGH
    for decade in range(scale.low, scale.high + 1):
        y = bottom - (decade - scale.low) / (scale.high - scale.low) * HIGH
        sheet.rule(left, right, y, RULE)
        sheet.text(MARGIN, y - 8, f"1e{decade}", 13, SOFT)
    last = -1e9
    for share, name in scale.layers():
        x = left + share * (right - left)
        sheet.line([(x, top), (x, bottom)], RULE, 0.5)
        if x - last > 26:
            sheet.text(x + 2, bottom + 4, name, 12, SOFT)
            last = x
    sheet.text(
        left,
        bottom + 22,
        "modules in order of execution; v0: first block of the vision tower, 0: first layer of the text model",
        12,
        SOFT,
    )
    y = bottom + 48
    for k, (report, label) in enumerate(zip(reports, labels, strict=True)):
        colour = LINES[k % len(LINES)]
        errors, bounds = (
            [(left + a * (right - left), bottom - b * HIGH) for a, b in line]
            for line in points(report, scale)
        )
        if len(errors) > 1:
            sheet.line(bounds, colour, 1, dashed=True)
            sheet.line(errors, colour, 2)
        first = report.first
        if first is not None:
            at = next(
                p for p, row in zip(errors, report.modules, strict=True) if row.name == first.name
            )
            sheet.ring(at, 6, colour, 2)
        sheet.line([(MARGIN, y + 9), (MARGIN + 28, y + 9)], colour, 3)
        sheet.text(MARGIN + 38, y, sheet.wrapped(label, 14, right - MARGIN - 40, 1)[0], 14, INK)
        y += 20
        words = "alike" if first is None else f"parts at {first}"
        for part in sheet.wrapped(words, 12, right - MARGIN - 40, 2):
            sheet.text(MARGIN + 38, y, part, 12, SOFT)
            y += 17
        y += 6
    out = io.BytesIO()
    sheet.image(y + MARGIN - 20).save(out, "PNG")
    return out.getvalue()
