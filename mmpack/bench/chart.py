"""The chart of the step's benchmark: seconds by model and workload, as SVG and as PNG, of the same marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from mmpack.bench.workloads import WORKLOADS
from mmpack.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH = 860
_MARGIN, _GAP, _BAR, _PITCH, _HEAD, _VALUE = 16, 14, 13, 18, 46, 62  # pixels
_INK, _QUIET, _PAPER = "#1b1f23", "#5f6b76", "#ffffff"
_SHADES = ("#d0d5db", "#b4bdc6", "#8a96a3", "#90caf9", "#1e88e5", "#0d47a1")

# Label and peers of each bar: the fastest of them is shown.
BARS = {
    "padded, as TRL": ("padded",),
    "padded, best": ("padded", "padded-tower", "padded-tower-no-mask", "liger"),
    "padding removed, as verl": ("removed-padding",),
    "mmpack, plain packs": ("plain",),
    "mmpack, shared prefixes": ("shared",),
    "… and compiled layers": ("shared-compiled",),
}
_OTHERS = 3  # bars that are not mmpack's


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True)
class Text:
    """A line of text from x on, its baseline at y."""

    x: float
    y: float
    text: str
    size: int = 13
    fill: str = _INK
    bold: bool = False


@dataclass(frozen=True)
class Chart:
    """Marks on white paper."""

    title: str
    width: int
    height: int
    marks: list[Box | Text]


def figures(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[float | str | None]]:
    """Of each (model, workload) that has bars of others and of mmpack: a bar's seconds, or why it did not run.

    None: not measured.
    """
    out = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        for workload in WORKLOADS:
            of_peer = {
                row["peer"]: row
                for row in rows
                if (row["model"], row["workload"]) == (model, workload)
            }
            bars = [_best([of_peer[p] for p in peers if p in of_peer]) for peers in BARS.values()]
            others, own = bars[:_OTHERS], bars[_OTHERS:]
            if all(any(bar is not None for bar in of) for of in (others, own)):
                out[model, workload] = bars
    return out


def _best(rows: list[dict[str, Any]]) -> float | str | None:
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    if seconds:
        return float(min(seconds))
    return str(rows[0]["did_not_run"]) if rows else None


def draw(rows: list[dict[str, Any]], title: str) -> Chart:
    """Models from top to bottom, workloads from left to right, each panel on a scale of its own."""
    found = figures(rows)
    models = list(dict.fromkeys(model for model, _ in found))
    workloads = [w for w in WORKLOADS if any(key[1] == w for key in found)]
    marks: list[Box | Text] = [Text(_MARGIN, 28, title, 16, bold=True)]
    drawn = [any(bars[k] is not None for bars in found.values()) for k in range(len(BARS))]
    marks += _legend(_MARGIN, 52, drawn)
    count = max(len(workloads), 1)
    panel = (WIDTH - 2 * _MARGIN - (count - 1) * _GAP) / count
    top = 74.0
    for model in models:
        marks.append(Text(_MARGIN, top + 14, name_of(model), 14, bold=True))
        for column, workload in enumerate(workloads):
            x = _MARGIN + column * (panel + _GAP)
            if (model, workload) in found:
                marks.append(Text(x, top + 34, WORKLOADS[workload].about, 12, _QUIET))
                marks += _bars(found[model, workload], x, top + _HEAD, panel)
        most = max(sum(b is not None for b in bars) for (m, _), bars in found.items() if m == model)
        top += _HEAD + most * _PITCH + 12
    return Chart(title, WIDTH, int(top), marks)


def _legend(x: float, y: float, drawn: list[bool]) -> list[Box | Text]:
    out: list[Box | Text] = []
    for label, fill, shown in zip(BARS, _SHADES, drawn, strict=True):
        if not shown:
            continue
        out += [Box(x, y - 10, 11, 11, fill), Text(x + 16, y, label, 12, _QUIET)]
        x += 32 + 6.8 * len(label)  # of the widest usual font
    return out


def _bars(values: list[float | str | None], x: float, y: float, width: float) -> list[Box | Text]:
    out: list[Box | Text] = []
    longest = max((v for v in values if isinstance(v, float)), default=0.0)
    for value, fill in zip(values, _SHADES, strict=True):
        if value is None:
            continue
        if isinstance(value, float):
            long = (width - _VALUE) * value / longest
            out.append(Box(x, y, round(long, 1), _BAR, fill))
            out.append(Text(round(x + long + 6, 1), y + 11, seconds(value), 12))
        else:
            out.append(Text(x, y + 11, value, 12, _QUIET))
        y += _PITCH
    return out


def seconds(value: float) -> str:
    """Three digits or so."""
    return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"


def name_of(model: str) -> str:
    """`qwen2.5-vl-7b` as its makers write it."""
    return model.replace("qwen", "Qwen").replace("-vl-", "-VL-").replace("b", "B")


def svg(chart: Chart) -> str:
    """The chart as text; an alternative text is its title."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width} {chart.height}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        f"  <title>{escape(chart.title)}</title>",
        f'  <rect width="{chart.width}" height="{chart.height}" fill="{_PAPER}"/>',
    ]
    for mark in chart.marks:
        if isinstance(mark, Box):
            size = f'width="{mark.width:g}" height="{mark.height:g}"'
            lines.append(f'  <rect x="{mark.x:g}" y="{mark.y:g}" {size} fill="{mark.fill}"/>')
        else:
            bold = ' font-weight="bold"' if mark.bold else ""
            lines.append(
                f'  <text x="{mark.x:g}" y="{mark.y:g}" font-size="{mark.size}" fill="{mark.fill}"{bold}>'
                f"{escape(mark.text)}</text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def png(chart: Chart, scale: int = 2) -> Image:
    """The chart as an RGB picture.

    Raises: MissingExtraError without Pillow.
    """
    image = require("PIL.Image", "view", "a chart as PNG")
    pen_on = require("PIL.ImageDraw", "view", "a chart as PNG").Draw
    font = require("PIL.ImageFont", "view", "a chart as PNG").load_default
    out = image.new("RGB", (chart.width * scale, chart.height * scale), _PAPER)
    pen = pen_on(out)
    for mark in chart.marks:
        x, y = mark.x * scale, mark.y * scale
        if isinstance(mark, Box):
            pen.rectangle(
                (x, y, x + mark.width * scale, y + mark.height * scale), mark.fill, width=0
            )
        else:
            # Pillow's own font has no ×
            line = mark.text.replace("×", "x")
            pen.text((x, y), line, mark.fill, font(mark.size * scale), "ls")
    return out
