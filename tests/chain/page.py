"""The page of the chain: verdict and setting, stages by axes in one table, and every row with its numbers."""

from __future__ import annotations

from chain.compare import DIRECTIONS, Row
from chain.report import ChainReport
from chain.stages import STAGES

from mmpack.view import pages
from mmpack.view.parts import Heading, Line, Part, Styled, Table

WORDS = {"forward": "forward", "backward": "gradients to activations", "weights": "to weights"}


def page(report: ChainReport) -> str:
    """A report as one self-contained page that runs no script and loads nothing.

    Raises: MissingExtraError without MarkupSafe.
    """
    return pages.page("The chain", _parts(report))


def _parts(report: ChainReport) -> list[Part]:
    verdict, *lines = report.lines()
    setting = ", ".join(f"{name} {value}" for name, value in report.setting.items())
    maps: list[Part] = []
    for direction in DIRECTIONS:
        maps += [Heading(WORDS[direction].capitalize()), _map(report, direction)]
    legend = (
        "= equal, bit for bit; a number: the largest difference in units in the last place of the largest value, "
        "within the contract; ✗: beyond it; –: not run."
    )
    return [
        Heading("The chain", 1),
        Line([Styled(verdict, style="good" if report.ok else "bad")]),
        Line(setting, soft=True),
        *map(Line, lines),
        Line(legend, soft=True),
        *maps,
        Heading("Rows"),
        Table(*report.table()),
    ]


def _map(report: ChainReport, direction: str) -> Table:
    """Stages, and behind each the kinds of its weights, by runs."""
    chosen = [r for r in report.rows if r.direction == direction]
    rows = {(r.axis, r.value, r.kind or r.stage): r for r in chosen}
    runs = list(dict.fromkeys(key[:2] for key in rows))
    chosen.sort(key=lambda r: list(STAGES).index(r.stage))  # stable
    names = dict.fromkeys(r.kind or r.stage for r in chosen)
    head = ("stage", *(f"{axis} {value}".strip() for axis, value in runs))
    body = [(name, *(_cell(rows.get((*run, name))) for run in runs)) for name in names]
    return Table(head, body)


def _cell(row: Row | None) -> Styled:
    if row is None or row.not_run:
        return Styled("–", style="mm-note")
    if row.equal:
        return Styled("=", style="good")
    text = f"{row.peak_ulps:.3g}"
    return Styled(text) if row.within else Styled(f"✗ {text}", style="bad")
