"""Reports of the probe as pages and figures: layer × error, with what is allowed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mmpack.errors import ArgumentError, kind_of
from mmpack.files import replaced
from mmpack.probe.report import ProbeReport


def html(
    report: ProbeReport,
    *,
    others: Sequence[ProbeReport] | ProbeReport = (),
    title: str | None = None,
) -> str:
    """A report as one self-contained page: what parts first, a chart of layer × error, a table of all modules.

    `others`: reports that the chart shows beside it, as with a setting enabled and disabled.
    Raises: ArgumentError; MissingExtraError without Jinja2.
    """
    from mmpack.view.pages import page
    from mmpack.view.probe.parts import report_parts

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
        others: reports that are drawn beside it, as with a setting enabled and disabled.
        labels: one per report; by default its two sides.

    Raises: ArgumentError; MissingExtraError without Pillow.
    """
    from mmpack.view.figures import figure
    from mmpack.view.probe.parts import figure_parts

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
