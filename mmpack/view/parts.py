"""What a page is made of: headings, lines, tables, keys, drawings and small figures beside one another.

A page and a figure are made of the same parts: HTML by `written`, PNG by `parts_figure.figure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mmpack.view.shapes import Drawing, scrolled, svg
from mmpack.view.tags import Markup, joined, table, tag


@dataclass(frozen=True)
class Heading:
    """`level`: 1 of the page, 2 or 3 of a part. `verdict`: `good` or `bad`."""

    text: str
    level: int = 2
    verdict: str = ""


@dataclass(frozen=True)
class Line:
    """A line of text; `soft`: beside the point."""

    text: str
    soft: bool = False


@dataclass(frozen=True)
class Table:
    """`folded`: the word that opens it; a figure has no such tables."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    folded: str = ""


@dataclass(frozen=True)
class Key:
    """Styles of boxes, and what each stands for."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figure:
    """A small drawing with a title and a caption."""

    title: str
    drawing: Drawing
    caption: str


@dataclass(frozen=True)
class Grid:
    """Small figures beside one another."""

    figures: Sequence[Figure]


Part = Heading | Line | Table | Key | Drawing | Grid


def written(parts: Iterable[Part]) -> Markup:
    """The parts as HTML."""
    return joined(map(_written, parts))


def key(entries: Iterable[tuple[str, str]]) -> Markup:
    """Each style as a small box with its name."""
    found = []
    for style, name in entries:
        box = tag("rect", width=10, height=10, class_=style)
        found.append(tag("span", tag("svg", box, view_box="0 0 10 10"), name))
    return tag("div", *found, class_="mm-key")


def _written(part: Part) -> Markup:
    if isinstance(part, Drawing):
        return scrolled(part)
    if isinstance(part, Key):
        return key(part.entries)
    if isinstance(part, Heading):
        return tag(f"h{part.level}", part.text, class_=part.verdict or None)
    if isinstance(part, Line):
        return tag("p", part.text, class_="mm-note" if part.soft else None)
    if isinstance(part, Grid):
        return tag("div", *map(_figure, part.figures), class_="mm-figures")
    found = table(part.head, list(part.rows), label=part.folded or None)
    return tag("details", tag("summary", part.folded), found) if part.folded else found


def _figure(figure: Figure) -> Markup:
    said = tag("p", tag("b", figure.title), f" {figure.caption}")
    return tag("div", svg(figure.drawing), said)
