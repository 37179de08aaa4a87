"""Charts as SVG and PNG, drawn by matplotlib: bars and dots with their labels and values, a question as their title.

Lengths are pixels. Text stays text, in the reader's own font, and colours follow a reader's dark mode. The same chart
gives the same bytes, on any machine with the same matplotlib.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDTH = 640
_MARGIN, _TITLE, _ROW, _BAR, _GROUP, _AXIS, _GAP, _PLANE = 16, 34, 20, 13, 27, 40, 10, 160
_SIZE, _SMALL = 13, 12
_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"

# By what it is: by day, by night.
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1b1f23", "#e6edf3"),
    "quiet": ("#59636e", "#9aa5b1"),
    "grid": ("#e3e7eb", "#262d36"),
    "own": ("#1565c0", "#58a6ff"),
    "own, another way": ("#4d8fce", "#3273b8"),
    "missed": ("#d4480b", "#f0883e"),
    "peer": ("#8b949e", "#6e7984"),
    "beside": ("#8b949f", "#6e7985"),  # as a peer, of other work: nothing is judged by it
    "floor": ("#424a53", "#b1bac4"),
}
OWN = ("own", "own, another way", "missed")


@dataclass(frozen=True)
class Bar:
    """One figure: its name, its value in the panel's unit and what is written behind it; no value: only that.

    `floor` is a tick on it, in the same unit.
    """

    label: str
    value: float | None
    text: str
    kind: str = "peer"
    floor: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars of the same work."""

    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Line:
    """Points (x, y) of a curve, and its name in the legend; without one it is thin."""

    label: str
    points: list[tuple[float, float]]
    kind: str = "peer"


@dataclass(frozen=True)
class Panel:
    """Groups on one axis, or `lines` over it, of `y` from 0 to 1.

    `log`: dots on a logarithmic axis, or bars from 1 where these are `ratios`. `mark`: a line at a value, and its name.
    `tick`: what a bar's floor is.
    """

    unit: str
    groups: list[Group]
    log: bool = False
    ratios: bool = False
    mark: tuple[float, str] | None = None
    tick: str = ""
    lines: Sequence[Line] = ()
    y: str = ""

    def limits(self) -> tuple[float, float]:
        """Of the axis."""
        values = [x for line in self.lines for x, _ in line.points]
        values += [v for b in _bars([self]) for v in (b.value, b.floor) if v is not None]
        values += [self.mark[0]] if self.mark else []
        low, high = min(values), max(values)
        if not self.log:
            return 0.0, high * 1.02
        if self.ratios:
            low, high = min(low, 1 / 1.2), max(high, 2)
        return low / 1.15, high * 1.15

    def share(self, value: float) -> float:
        """Where a value is on the axis, from 0 to 1."""
        low, high = self.limits()
        return math.log(value / low, high / low) if self.log else (value - low) / (high - low)


@dataclass(frozen=True)
class Headline:
    """A page in a line of the overview: how many times as fast as the fastest peer, and the share of its floor."""

    what: str
    faster: float | None = None
    peer: str = ""
    share: float | None = None
    floor: str = ""


@dataclass(frozen=True)
class Chart:
    """Panels below a question; `note` says what stands below the chart."""

    title: str
    panels: list[Panel]
    note: str
    headlines: tuple[Headline, ...] = ()


def judged(group: Group, higher: bool = False) -> Group:
    """The best of ours is shown as missed where a peer is better."""
    sign = -1 if higher else 1
    values = {
        kind: [sign * b.value for b in group.bars if b.kind in kinds and b.value is not None]
        for kind, kinds in {"own": OWN, "peer": ("peer",)}.items()
    }
    if not values["own"] or not values["peer"] or min(values["own"]) <= min(values["peer"]):
        return group
    best = min(values["own"])
    bars = [
        Bar(b.label, b.value, b.text, "missed", b.floor)
        if b.kind in OWN and b.value is not None and sign * b.value == best
        else b
        for b in group.bars
    ]
    return Group(group.title, bars)


def svg(chart: Chart) -> str:
    """The chart as text, which ends with a line."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    height = _save(chart, out, format="svg", metadata=nothing)
    return _finished(out.getvalue(), chart.title, height)


def png(chart: Chart) -> bytes:
    """The chart by day, at two pixels of the screen to one, for where SVG is not shown."""
    out = io.BytesIO()
    _save(
        chart,
        out,
        format="png",
        metadata={"Software": None},
        dpi=144,
        pil_kwargs={"optimize": True},
    )
    return out.getvalue()


def _save(chart: Chart, out: io.StringIO | io.BytesIO, **how: Any) -> int:
    """Draw; returns the height."""
    heights = [_height(panel) for panel in chart.panels]
    lines = _wrapped(chart.title, int((WIDTH - 2 * _MARGIN) / 8.6))
    top = _TITLE + 20 * (len(lines) - 1)
    height = top + sum(heights) + _GAP * (len(heights) - 1)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "mmpack", "font.family": "DejaVu Sans"}
    with styles.context(["default", settings]):  # whatever a user's own are
        figure = Figure((WIDTH / 72, height / 72), dpi=72, facecolor=_day("paper"))
        for k, line in enumerate(lines):
            y = 1 - (24 + 20 * k) / height
            style = {"size": 15, "weight": "bold", "color": _day("ink")}
            figure.text(_MARGIN / WIDTH, y, line, **style)
        labels = max(_wide(bar.label) for bar in _bars(chart.panels))
        left = _MARGIN + max(labels, 60) + 8
        right = left + min(_room(panel, WIDTH - _MARGIN - left) for panel in chart.panels)
        for panel, tall in zip(chart.panels, heights, strict=True):
            below = _below(panel)
            rows = tall - below - _mark_height(panel)
            bottom = height - top - tall + below
            box = (left / WIDTH, bottom / height, (right - left) / WIDTH, rows / height)
            _panel(figure.add_axes(box), panel, rows, left, right - left)
            top += tall + _GAP
        figure.savefig(out, facecolor=_day("paper"), **how)
    return height


def _bars(panels: list[Panel]) -> list[Bar]:
    return [bar for panel in panels for group in panel.groups for bar in group.bars]


def _height(panel: Panel) -> int:
    rows = sum(_GROUP * bool(g.title) + _ROW * len(g.bars) for g in panel.groups)
    rows += (_GROUP + _PLANE) * bool(panel.lines)
    return rows + _below(panel) + _mark_height(panel)


def _below(panel: Panel) -> int:
    return _AXIS + 18 * bool(panel.tick)


def _room(panel: Panel, most: float) -> float:
    """How wide an axis can be, so that the text behind each bar ends before the edge."""
    found = [most - 20]
    for bar in _bars([panel]):
        ends = [v for v in (bar.value, bar.floor) if v is not None]
        share = max([panel.share(v) for v in ends] + [panel.share(1.0)] * panel.ratios, default=0.0)
        found.append((most - _wide(bar.text) - 12) / max(share, 0.05))
    return min(found)


@cache
def _wide(text: str) -> float:
    """In DejaVu Sans, the widest of usual fonts."""
    font = FontProperties(family="DejaVu Sans", size=_SIZE)
    return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0])


def _mark_height(panel: Panel) -> int:
    return 18 if panel.mark else 4


def _panel(axes: Axes, panel: Panel, rows: int, left: float, wide: float) -> None:
    """Rows from the top; y is pixels."""
    axes.set_ylim(rows, 0)
    _axis(axes, panel)
    if panel.lines:
        return _lines(axes, panel, left, wide)
    low, high = axes.get_xlim()
    y = 0.0
    for group in panel.groups:
        if group.title:
            at = (_MARGIN - left) / wide
            axes.text(
                at, y + 19, group.title, **_style(axes, "ink", _SIZE), weight="bold", **_over()
            )
            y += _GROUP
        for bar in group.bars:
            _row(axes, panel, bar, y + _ROW / 2, low, high)
            y += _ROW
    if panel.tick:
        across = axes.get_yaxis_transform()
        tick = {"color": _day("ink"), "linewidth": 2, "clip_on": False, "transform": across}
        axes.plot([1 / wide] * 2, [rows + 41, rows + 52], **tick)
        at = 8 / wide
        axes.text(at, rows + 51, panel.tick, **_style(axes, "quiet", _SMALL), va="baseline")
    if panel.mark:
        value, name = panel.mark
        axes.axvline(value, color=_day("ink"), linewidth=1, zorder=3, clip_on=False)
        place = axes.transData.transform((value, 0))[0]
        start = axes.transAxes.transform((0, 0))[0]
        side = "right" if (place - start) / wide > 0.6 else "center"
        said = {"size": _SMALL, "color": _day("ink"), "ha": side}
        shift = (3 if side == "right" else 0, 5)
        axes.annotate(name, (value, 0), shift, textcoords="offset points", **said)


def _lines(axes: Axes, panel: Panel, left: float, wide: float) -> None:
    axes.set_ylim(0, 1 + _GROUP / _PLANE)
    axes.set_yticks((0, 0.5, 1))
    axes.grid(axis="y", color=_day("grid"), linewidth=1)
    for line in panel.lines:
        how = {"linewidth": 2.5, "label": line.label} if line.label else {"alpha": 0.4}
        axes.plot(*zip(*line.points, strict=True), color=_day(line.kind), **how)
    at = (_MARGIN - left) / wide, 1 + 10 / _PLANE
    axes.text(*at, panel.y, **_style(axes, "ink", _SIZE), weight="bold", **_over())
    axes.legend(loc="lower right", frameon=False, fontsize=_SIZE, labelcolor=_day("ink"))


def _axis(axes: Axes, panel: Panel) -> None:
    low, high = panel.limits()
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1,) if high / low > 50 else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=_SMALL, labelcolor=_day("quiet"), pad=4)
    axes.set_xlabel(panel.unit, size=_SMALL, color=_day("quiet"), loc="left", labelpad=2)
    axes.grid(axis="x", color=_day("grid"), linewidth=1)
    axes.set_axisbelow(True)
    axes.set_frame_on(False)


def _number(value: float, _: int | None) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _row(axes: Axes, panel: Panel, bar: Bar, y: float, low: float, high: float) -> None:
    start = 1.0 if panel.ratios and panel.log else low
    said = {"size": _SIZE, "va": "baseline", "textcoords": "offset points"} | _over()
    ink = _day("ink" if bar.kind in OWN else "quiet")
    across = axes.get_yaxis_transform()
    axes.annotate(bar.label, (0, y), (-8, -4.5), across, ha="right", color=ink, **said)
    end = start
    if bar.value is not None:
        end = max(bar.value, start)
        if panel.log and not panel.ratios:
            axes.plot([low, bar.value], [y, y], color=_day("grid"), linewidth=1.5, zorder=1)
            dot = {"markeredgewidth": 0, "markersize": 9, "clip_on": False, "zorder": 4}
            axes.plot([bar.value], [y], "o", color=_day(bar.kind), **dot)
        else:
            long = bar.value - start
            axes.barh(y, long, _BAR, start, color=_day(bar.kind), linewidth=0, zorder=2)
    if bar.floor is not None:
        tick = [y - _BAR / 2 - 2, y + _BAR / 2 + 2]
        axes.plot([bar.floor] * 2, tick, color=_day("ink"), linewidth=2, zorder=5, clip_on=False)
        end = max(end, bar.floor)
    shift = 9 if panel.log and not panel.ratios else 6
    colour = _day("missed") if bar.kind == "missed" else ink
    axes.annotate(bar.text, (end, y), (shift, -4.5), color=colour, **said)


def _over() -> dict[str, object]:
    """Of text on lines: paper behind it."""
    return {"bbox": {"facecolor": _day("paper"), "linewidth": 0, "pad": 0.5}, "zorder": 6}


def _style(axes: Axes, colour: str, size: int) -> dict[str, object]:
    return {"size": size, "color": _day(colour), "transform": axes.get_yaxis_transform()}


def _day(name: str) -> str:
    return COLOURS[name][0]


def _wrapped(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _finished(text: str, title: str, height: int) -> str:
    """Pixels for points, a title for readers of the screen, a reader's own font, and the colours of the night."""
    body = text[text.index("<g ") : text.rindex("</svg>")]
    body = re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE).replace("'DejaVu Sans'", _FONT)
    night = "".join(_by_night())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>@media (prefers-color-scheme: dark) {{{night}}}</style>\n{body.rstrip()}\n</svg>\n"
    )


def _by_night() -> Iterator[str]:
    for day, dark in COLOURS.values():
        for part in ("fill", "stroke"):
            yield f'[style*="{part}: {day}"] {{{part}: {dark} !important}} '
