"""Drawings of boxes, lines and words, in units of their own; as SVG here, on a sheet by `parts_figure`.

A shape's `style` is a class of `SHAPES`, whose colours are variables of the page: a drawing follows its theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmpack.view.tags import Markup, tag

WIDE = 1000.0  # of a drawing that is as wide as the page
MOST = 4000  # shapes of one drawing; whoever draws more says how much is left out

SHAPES = """
.mm-d{display:block;width:100%;font:12px system-ui,sans-serif}
.mm-d text{fill:var(--fg)}.mm-d text.mm-soft{fill:var(--soft)}.mm-d text.mm-mean{fill:var(--bad)}
.mm-d .mm-text{fill:var(--text)}.mm-d .mm-image{fill:var(--image)}.mm-d .mm-video{fill:var(--video)}
.mm-d .mm-audio{fill:var(--audio)}.mm-d .mm-loss{fill:var(--loss)}.mm-d .mm-observation{fill:var(--observation)}
.mm-d .mm-placeholder{fill:var(--placeholder)}.mm-d .mm-read{fill:var(--fg)}.mm-d .mm-room{fill:var(--line)}
.mm-d .mm-box{fill:var(--card);stroke:var(--soft)}.mm-d .mm-hit{fill:transparent}.mm-d .mm-pale{opacity:.4}
.mm-d .mm-under{opacity:.6}
.mm-d line{stroke:var(--soft)}.mm-d line.mm-mean{stroke:var(--bad);stroke-dasharray:4 3}
.mm-d .mm-of{fill:var(--c)}
.mm-d:not([height]){height:auto}.mm-wide .mm-d:not([height]){min-width:880px}
.wide:focus-visible{outline:2px solid var(--focus,currentColor)}
.mm-figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.8rem 1.6rem;margin:.4rem 0}
.mm-figures p{margin:.2rem 0;font-size:.84rem;color:var(--soft)}.mm-figures b{color:var(--fg)}
"""


@dataclass(frozen=True)
class Box:
    """`about`: what is said when it is pointed at. `round`: radius of its corners."""

    x: float
    y: float
    width: float
    height: float
    style: str
    about: str = ""
    round: float = 0


@dataclass(frozen=True)
class Stroke:
    """A straight line; dashed where its style is `mm-mean`."""

    x1: float
    y1: float
    x2: float
    y2: float
    style: str = "mm-axis"


@dataclass(frozen=True)
class Word:
    """Text whose base line is at `y`; `anchor`: what of it is at `x`: start, middle or end."""

    x: float
    y: float
    text: str
    style: str = ""
    anchor: str = "start"
    size: int = 12


@dataclass(frozen=True)
class Drawing:
    """`label`: for who can't see it. Without words it is as high as it says on any page, however narrow."""

    shapes: Sequence[Box | Stroke | Word]
    height: float
    label: str
    width: float = WIDE


def svg(drawing: Drawing) -> Markup:
    """As wide as what holds it."""
    words = any(isinstance(shape, Word) for shape in drawing.shapes)
    return tag(
        "svg",
        *map(_shape, drawing.shapes),
        view_box=f"0 0 {_n(drawing.width)} {_n(drawing.height)}",
        role="img",
        aria_label=drawing.label,
        class_="mm-d",
        height=None if words else _n(drawing.height),
        preserveAspectRatio=None if words else "none",
    )


def scrolled(drawing: Drawing) -> Markup:
    """In a part of the page that scrolls by itself, by keys too, where its words would be too small."""
    options = {"class_": "wide mm-wide", "tabindex": "0", "role": "group"}
    return tag("div", svg(drawing), aria_label=drawing.label, **options)


def _shape(shape: Box | Stroke | Word) -> Markup:
    if isinstance(shape, Stroke):
        ends = {"x1": _n(shape.x1), "y1": _n(shape.y1), "x2": _n(shape.x2), "y2": _n(shape.y2)}
        return tag("line", class_=shape.style, **ends)
    place = {"x": _n(shape.x), "y": _n(shape.y)}
    if isinstance(shape, Word):
        anchor = None if shape.anchor == "start" else shape.anchor
        size = None if shape.size == 12 else shape.size
        style = shape.style or None
        return tag("text", shape.text, class_=style, text_anchor=anchor, font_size=size, **place)
    place |= {"width": _n(max(shape.width, 0.0)), "height": _n(shape.height)}
    about = tag("title", shape.about) if shape.about else ""
    return tag("rect", about, class_=shape.style, rx=shape.round or None, **place)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
