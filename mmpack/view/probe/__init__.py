"""Reports of the probe as pages and figures: layer × error, with what is allowed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, kind_of
from mmpack.files import replaced
from mmpack.probe.report import ProbeReport

__all__ = ["chart", "html"]


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

    reports = _checked([report, *_listed(others, "to_html")], "to_html")
    return page("mmpack probe", report_parts(reports, title))


def chart(
    reports: Sequence[ProbeReport] | ProbeReport,
    path: str | os.PathLike[str] | None = None,
    *,
    labels: Sequence[str] | None = None,
    title: str = "Where two sides part",
) -> bytes:
    """Layer × error of one report or several as a PNG, on one logarithmic scale; its bytes.

    Modules stand in the order of execution. Each report has a line of its largest errors, and a dashed one of what is
    allowed there; a ring marks where it parts first.

    Args:
        reports: such as of a setting enabled and disabled.
        path: written too, if given.
        labels: one per report; by default its two sides.

    Raises: ArgumentError; MissingExtraError without Pillow.
    """
    from mmpack.view.figures import figure
    from mmpack.view.probe.parts import figure_parts

    checked = _checked(_listed(reports, "chart"), "chart")
    names = [f"{r.a} | {r.b}" for r in checked] if labels is None else list(labels)
    if len(names) != len(checked) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f"probe.chart: {len(checked)} reports, labels {names!r:.60}. Fix: pass one str per report"
        )
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"probe.chart: path is {kind_of(path)}. Fix: pass a name ending in .png"
        )
    made = figure(figure_parts(checked, names, title))
    if path is not None:
        if Path(path).suffix.lower() != ".png":
            raise ArgumentError(
                f"probe.chart: {Path(path).name!r:.60} is no .png. Fix: pass a name ending in .png"
            )
        with replaced(Path(path), "probe.chart", ArgumentError) as file:
            file.write(made)
    return made


def _listed(reports: Any, what: str) -> list[Any]:
    """One report or several as a list."""
    if isinstance(reports, ProbeReport):
        return [reports]
    if not isinstance(reports, Iterable):
        raise ArgumentError(
            f"probe.{what}: what to draw is {kind_of(reports)}. Fix: pass what mp.probe.run returns"
        )
    return list(reports)


def _checked(reports: list[ProbeReport], what: str) -> list[ProbeReport]:
    if not reports:
        raise ArgumentError(f"probe.{what}: there are no reports. Fix: pass one or more")
    for report in reports:
        if not isinstance(report, ProbeReport):
            raise ArgumentError(
                f"probe.{what}: what to draw is {kind_of(report)}. Fix: pass what mp.probe.run returns"
            )
    return reports
