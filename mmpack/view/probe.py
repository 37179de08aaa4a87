"""Reports of the probe as pages and figures: what parts first, layer × error with what is allowed, all modules."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, kind_of
from mmpack.files import replaced
from mmpack.probe.report import Kind, ProbeReport
from mmpack.view import parts as draw

LAYER = re.compile(r"\.(layers|blocks|layer)\.(\d+)(?=\.|$)")
LEAST = 1e-9  # errors of 0 stand on the lowest line
HIGH, LEFT, TOP, BELOW = 320.0, 52.0, 8.0, 22.0  # of the chart: its room, and what is around it
CURVES = 4  # styles of curves


def html(
    report: ProbeReport,
    *,
    others: Sequence[ProbeReport] | ProbeReport = (),
    title: str | None = None,
) -> str:
    """A report as one self-contained page: what parts first, a chart of layer × error, a table of all modules.

    `others`: reports that the chart shows too, as with a setting enabled and disabled.
    Raises: ArgumentError; MissingExtraError without Jinja2.
    """
    from mmpack.view.pages import page

    return page("mmpack probe", report_parts(_all(report, others, "to_html"), title))


def png(
    report: ProbeReport,
    path: str | os.PathLike[str] | None = None,
    *,
    others: Sequence[ProbeReport] | ProbeReport = (),
    labels: Sequence[str] | None = None,
    title: str = "Where two sides part",
) -> bytes:
    """Layer × error of one report or several as a PNG, on one logarithmic scale; its bytes.

    Modules stand in the order of execution. Each report has a line of its largest errors, and a dashed one of what is
    allowed there; a ring marks where it parts first.

    Args:
        path: written too, if given.
        others: reports that are drawn too, as with a setting enabled and disabled.
        labels: one per report; by default its two sides.

    Raises: ArgumentError; MissingExtraError without Pillow.
    """
    from mmpack.view.figures import figure

    reports = _all(report, others, "to_png")
    names = [f"{r.a} | {r.b}" for r in reports] if labels is None else list(labels)
    if len(names) != len(reports) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f"probe.to_png: {len(reports)} reports, labels {names!r:.60}. Fix: pass one str per report"
        )
    if path is not None and not str(path).lower().endswith(".png"):
        raise ArgumentError(
            f"probe.to_png: path is {path!r:.60}. Fix: pass a name ending in .png, or none"
        )
    made = figure(figure_parts(reports, names, title))
    if path is not None:
        with replaced(Path(path), "probe.to_png", ArgumentError) as file:
            file.write(made)
    return made


def _all(
    report: ProbeReport, others: Sequence[ProbeReport] | ProbeReport, what: str
) -> list[ProbeReport]:
    """The report and others, one or several."""
    listed = (
        [others] if isinstance(others, ProbeReport) or not isinstance(others, Iterable) else others
    )
    reports = [report, *listed]
    for one in reports:
        if not isinstance(one, ProbeReport):
            raise ArgumentError(
                f"probe.{what}: what to draw is {kind_of(one)}. Fix: pass what mp.probe.run returns"
            )
    return reports


@dataclass
class Scale:
    """Names of the stages of all reports, in order, and the decades that hold every error."""

    stages: list[str]
    low: int
    high: int

    def x(self, name: str) -> float:
        return self._across(self.stages.index(name))

    def y(self, error: float) -> float:
        value = math.log10(max(error, LEAST)) if math.isfinite(error) else math.inf
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return HIGH - share * (HIGH - TOP)

    def layers(self) -> list[tuple[float, str]]:
        """Where each layer begins, and its short name."""
        out: dict[str, float] = {}
        for k, stage in enumerate(self.stages):
            if found := LAYER.search(stage):
                short = f"{'' if found[1] == 'layers' else 'v'}{found[2]}"
                out.setdefault(short, self._across(k))
        return [(x, short) for short, x in out.items()]

    def _across(self, stage: int) -> float:
        return LEFT + stage / max(len(self.stages) - 1, 1) * (draw.WIDE - LEFT - 8)


def scale_of(reports: Sequence[ProbeReport]) -> Scale:
    """One scale for all reports."""
    stages: list[str] = []
    values = [LEAST * 10]
    for report in reports:
        at = 0
        for row in report.modules:
            if row.name in stages:
                at = stages.index(row.name) + 1
            else:
                stages.insert(at, row.name)
                at += 1
            values += [v for v in (row.all.max_error, row.all.bound) if v > 0 and math.isfinite(v)]
    low = max(math.floor(math.log10(min(values))), math.floor(math.log10(LEAST)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    return Scale(stages, low, high)


def report_parts(reports: Sequence[ProbeReport], title: str | None = None) -> list[draw.Part]:
    """What a page and a notebook show; the first report is the subject."""
    report = reports[0]
    only = [
        draw.Line([f"only {name} has, so not compared: ", draw.Styled(", ".join(names), "code")])
        for name, names in zip((report.a, report.b), report.only, strict=True)
        if names
    ]
    again = [draw.Line(["again: ", draw.Styled(report.command, "code")])] if report.command else []
    return [
        *([draw.Heading(title, 1)] if title else []),
        *_head(report),
        draw.Heading("Layer × error"),
        *chart_parts(reports, [f"{r.a} | {r.b}" for r in reports]),
        draw.Heading("Modules"),
        _modules(report),
        *only,
        *again,
    ]


def figure_parts(
    reports: Sequence[ProbeReport], labels: Sequence[str], title: str
) -> list[draw.Part]:
    """What a figure shows: the chart, and where each report parts."""
    about = "largest error of each module in order of execution, relative to its row"
    parts: list[draw.Part] = [
        draw.Heading(title, 1),
        draw.Line(about, soft=True),
        *chart_parts(reports, labels),
    ]
    for report, label in zip(reports, labels, strict=True):
        words = "alike" if report.first is None else f"parts at {report.first}"
        parts.append(draw.Line(f"{label}: {words}", soft=True))
    return parts


def chart_parts(reports: Sequence[ProbeReport], labels: Sequence[str]) -> list[draw.Part]:
    """All reports' lines on one logarithmic scale, and what they stand for."""
    scale = scale_of(reports)
    shapes: list[draw.Shape] = []
    for decade in range(scale.low, scale.high + 1):
        y = scale.y(10.0**decade)
        shapes += [
            draw.Stroke(LEFT, y, draw.WIDE, y, "mm-rule"),
            draw.Word(0, y + 4, f"1e{decade}", "mm-soft"),
        ]
    last = -100.0
    for x, name in scale.layers():
        shapes.append(draw.Stroke(x, 0, x, HIGH, "mm-rule"))
        if x - last > 22:
            shapes.append(draw.Word(x + 2, HIGH + 16, name, "mm-soft"))
            last = x
    for k, report in enumerate(reports):
        style = f"mm-line{k % CURVES}"
        # from left to right, whatever order its modules ran in
        rows = sorted(report.modules, key=lambda row: scale.x(row.name))
        for dashed in (True, False):
            points = [
                (scale.x(r.name), scale.y(r.all.bound if dashed else r.all.max_error)) for r in rows
            ]
            shapes.append(draw.Curve(points, style, dashed))
        if report.first is not None:
            row = report.modules[report.first.index_of_module]
            shapes.append(draw.Ring(scale.x(row.name), scale.y(row.all.max_error), style))
    about = "largest error of each module, in order of execution, on a logarithmic scale"
    note = "dashed: what is allowed; ring: where it parts first; v0: first block of the tower, 0: first text layer"
    key = draw.Key([(f"mm-line{k % CURVES}", label) for k, label in enumerate(labels)], curves=True)
    return [draw.Drawing(shapes, HIGH + BELOW, about), key, draw.Line(note, soft=True)]


def _head(report: ProbeReport) -> Iterator[draw.Part]:
    first = report.first
    verdict, style = ("Alike", "good") if report.ok else ("Not compared", "bad")
    yield draw.Heading("Parted" if first else verdict, 1, "bad" if first else style)
    yield draw.Line(f"{report.a} and {report.b}", soft=True)
    if first is not None:
        rows: list[tuple[str, Any]] = [
            ("module", draw.Styled(first.name, "code")),
            ("stage", first.stage),
            ("sample, token", f"{first.sample}, {first.token}"),
            ("modality", first.modality),
            ("error, bound", f"{first.error:.2e}, {first.bound:.2e}"),
            ("look at", report.suggests),
        ]
        if first.medium is not None:
            rows.insert(4, ("medium, row", f"{first.medium}, {first.row}"))
        yield draw.Table(("first", ""), rows)
    elif report.ok:
        yield draw.Line(f"{len(report.modules)} stages agree within what rounding explains.")
    yield from map(draw.Line, report.notes)


def _modules(report: ProbeReport) -> draw.Table:
    kinds = list(dict.fromkeys(name for row in report.modules for name in row.kinds))
    rows = [
        (draw.Styled(row.name, "code"), f"{row.all.rows:,}", _cell(row.all))
        + tuple(_cell(row.kinds[name]) if name in row.kinds else "" for name in kinds)
        for row in report.modules
    ]
    return draw.Table(("module", "rows", "error / bound", *kinds), rows)


def _cell(kind: Kind) -> draw.Styled:
    words = f"{kind.max_error:.1e} ({kind.worst:.2g}×)"
    return draw.Styled(words, "mark" if kind.parted else "span")
