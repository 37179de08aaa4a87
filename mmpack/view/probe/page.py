"""The page: verdict, what parts first and what to look at, layer × error as a chart, and every module by modality."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from mmpack.probe.report import Kind, ProbeReport
from mmpack.view.parity.style import STYLE
from mmpack.view.probe.lines import Scale, points, scale_of
from mmpack.view.tags import Markup, joined, table, tag

WIDE, HIGH, LEFT, BELOW = 1000, 320, 52, 22
OWN = """
.mmpack .mm-chart{width:100%;height:auto;display:block}
.mmpack .mm-chart text{fill:var(--soft);font:11px system-ui,sans-serif}
.mmpack .mm-chart polyline{fill:none;stroke-width:2}.mmpack .mm-chart .mm-bound{stroke-width:1;stroke-dasharray:5 4}
.mmpack .mm-rule{stroke:var(--line);stroke-width:1}
.mmpack .mm-line0{stroke:var(--bad);fill:none}.mmpack .mm-line1{stroke:var(--image);fill:none}
.mmpack .mm-line2{stroke:var(--good);fill:none}.mmpack .mm-line3{stroke:var(--video);fill:none}
"""


def page(reports: Sequence[ProbeReport], title: str | None = None) -> str:
    """Reports as one self-contained page that runs no script and loads nothing; the first one is the subject."""
    style = STYLE + OWN
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>mmpack probe</title><style>{style}</style>"
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f'<body class="mmpack">{_body(reports, title)}</body></html>\n'
    )


def fragment(reports: Sequence[ProbeReport]) -> str:
    """The same for a notebook."""
    return str(
        tag("div", Markup(f"<style>{STYLE + OWN}</style>"), _body(reports, None), class_="mmpack")
    )


def _body(reports: Sequence[ProbeReport], title: str | None) -> Markup:
    report = reports[0]
    return joined(
        [
            tag("h1", title) if title else "",
            _head(report),
            tag("h2", "Layer × error"),
            chart(reports),
            _key(reports),
            tag("h2", "Modules"),
            _modules(report),
            _not_finite(report),
            _only(report),
            tag("p", "again: ", tag("code", report.command)) if report.command else "",
        ]
    )


def _head(report: ProbeReport) -> Markup:
    sides = tag("p", f"{report.a} and {report.b}", class_="mm-note")
    first = report.first
    if first is None:
        words = f"{len(report.modules)} stages agree within what rounding explains."
        return joined([tag("h1", "Alike", class_="good"), sides, tag("p", words)])
    rows: list[tuple[str, Any]] = [
        ("module", tag("code", first.name)),
        ("stage", first.stage),
        ("sample, token", f"{first.sample}, {first.token}"),
        ("modality", first.modality),
        ("error, bound", f"{first.error:.2e}, {first.bound:.2e}"),
        ("look at", report.suggests),
    ]
    if first.medium is not None:
        rows.insert(4, ("medium, row", f"{first.medium}, {first.row}"))
    return joined([tag("h1", "Parted", class_="bad"), sides, table(("first", ""), rows)])


def chart(reports: Sequence[ProbeReport]) -> Markup:
    """An svg of all reports' lines."""
    scale = scale_of(reports)
    parts: list[Markup] = []
    for decade in range(scale.low, scale.high + 1):
        y = _y(scale, (decade - scale.low) / (scale.high - scale.low))
        parts.append(tag("line", x1=LEFT, x2=WIDE, y1=y, y2=y, class_="mm-rule"))
        parts.append(tag("text", f"1e{decade}", x=0, y=y + 4))
    last = -100.0
    for share, name in scale.layers():
        x = _x(share)
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=HIGH, class_="mm-rule"))
        if x - last > 22:
            parts.append(tag("text", name, x=x + 2, y=HIGH + 16))
            last = x
    for k, report in enumerate(reports):
        errors, bounds = (
            " ".join(f"{_x(a):.1f},{_y(scale, b):.1f}" for a, b in line)
            for line in points(report, scale)
        )
        parts.append(tag("polyline", points=bounds, class_=f"mm-bound mm-line{k % 4}"))
        parts.append(tag("polyline", points=errors, class_=f"mm-line{k % 4}"))
        if report.first is not None:
            row = report.modules[report.first.index_of_module]
            parts.append(
                tag(
                    "circle",
                    cx=f"{_x(scale.x(row.name)):.1f}",
                    cy=f"{_y(scale, scale.y(row.max_error)):.1f}",
                    r=6,
                    stroke_width=2,
                    class_=f"mm-line{k % 4}",
                )
            )
    return tag(
        "svg",
        *parts,
        view_box=f"0 0 {WIDE} {HIGH + BELOW}",
        class_="mm-chart",
        role="img",
        aria_label="largest error of each module, in order of execution, on a logarithmic scale",
    )


def _x(share: float) -> float:
    return LEFT + share * (WIDE - LEFT - 8)


def _y(scale: Scale, share: float) -> float:
    return HIGH - share * (HIGH - 8)


def _key(reports: Sequence[ProbeReport]) -> Markup:
    parts = [
        tag(
            "span",
            tag(
                "svg",
                tag("line", x1=0, x2=16, y1=8, y2=8, stroke_width=4, class_=f"mm-line{k % 4}"),
                view_box="0 0 16 16",
            ),
            f"{report.a} | {report.b}",
        )
        for k, report in enumerate(reports)
    ]
    note = "dashed: what is allowed; ring: where it parts first; v0: first block of the tower, 0: first text layer"
    return joined([tag("div", *parts, class_="mm-key"), tag("p", note, class_="mm-note")])


def _modules(report: ProbeReport) -> Markup:
    kinds = list(dict.fromkeys(name for row in report.modules for name in row.kinds))
    rows = []
    for row in report.modules:
        cells: list[Any] = [tag("code", row.name), f"{row.all.rows:,}", _cell(row.all)]
        cells += [_cell(row.kinds[name]) if name in row.kinds else "" for name in kinds]
        rows.append(cells)
    return table(("module", "rows", "error / bound", *kinds), rows)


def _cell(kind: Kind) -> Markup:
    words = f"{kind.max_error:.1e} ({kind.worst:.2g}×)"
    return tag("mark", words) if kind.parted else tag("span", words)


def _not_finite(report: ProbeReport) -> Markup:
    if report.not_finite is None:
        return Markup("")
    return tag(
        "p", f"NaN or infinite on both sides, and so not compared: first {report.not_finite}"
    )


def _only(report: ProbeReport) -> Markup:
    parts = []
    for name, names in zip((report.a, report.b), report.only, strict=True):
        if names:
            parts.append(
                tag("p", f"only {name} has, so not compared: ", tag("code", ", ".join(names)))
            )
    return joined(parts)
