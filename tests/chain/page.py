"""The page of the chain: verdict and setting, stages by axes in one table, and every row with its numbers."""

from __future__ import annotations

from chain.compare import DIRECTIONS, Row
from chain.report import ChainReport
from chain.stages import STAGES

from mmpack.view.document import document
from mmpack.view.parity.style import STYLE
from mmpack.view.tags import Markup, joined, table, tag

WORDS = {"forward": "forward", "backward": "gradients to activations", "weights": "to weights"}


def page(report: ChainReport) -> str:
    """A report as one self-contained page that runs no script and loads nothing.

    Raises: MissingExtraError without MarkupSafe.
    """
    return document("The chain", STYLE, _body(report))


def _body(report: ChainReport) -> Markup:
    verdict, *lines = report.lines()
    setting = ", ".join(f"{name} {value}" for name, value in report.setting.items())
    maps = [
        part
        for direction in DIRECTIONS
        for part in (tag("h2", WORDS[direction].capitalize()), _map(report, direction))
    ]
    return joined(
        [
            tag("h1", "The chain"),
            tag("p", tag("span", verdict, class_="good" if report.ok else "bad")),
            tag("p", setting, class_="mm-note"),
            *(tag("p", line) for line in lines),
            tag("p", "= equal, bit for bit; a number: the largest difference in units in the last place of the "
                "largest value, within the contract; ✗: beyond it; –: not run.", class_="mm-note"),
            *maps,
            tag("h2", "Rows"),
            table(*report.table()),
        ]
    )  # fmt: skip


def _map(report: ChainReport, direction: str) -> Markup:
    """Stages, and behind each the kinds of its weights, by runs."""
    chosen = [r for r in report.rows if r.direction == direction]
    rows = {(r.axis, r.value, r.kind or r.stage): r for r in chosen}
    runs = list(dict.fromkeys(key[:2] for key in rows))
    chosen.sort(key=lambda r: list(STAGES).index(r.stage))  # stable
    names = dict.fromkeys(r.kind or r.stage for r in chosen)
    head = ("stage", *(f"{axis} {value}".strip() for axis, value in runs))
    body = [(name, *(_cell(rows.get((*run, name))) for run in runs)) for name in names]
    return table(head, body)


def _cell(row: Row | None) -> Markup:
    if row is None or row.not_run:
        return tag("span", "–", class_="mm-note")
    if row.equal:
        return tag("span", "=", class_="good")
    text = f"{row.peak_ulps:.3g}"
    return tag("span", text) if row.within else tag("span", f"✗ {text}", class_="bad")
