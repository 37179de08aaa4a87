"""What pages and figures are made of, as data: texts, tables, drawings and what holds them.

`pages.written` makes HTML of them and `figures.figure` a PNG. A drawing's shapes are in units of its own; a shape's
`style` is a class of the page's style sheet, whose colours the figure has too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WIDE = 1000.0  # of a drawing that is as wide as the page
MOST = 4000  # shapes of one drawing; whoever draws more says how much is left out


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
class Curve:
    """Points joined by straight lines; `dashed` ones are thinner."""

    points: Sequence[tuple[float, float]]
    style: str
    dashed: bool = False


@dataclass(frozen=True)
class Ring:
    """A small circle around a point."""

    x: float
    y: float
    style: str


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
class Lattice:
    """Lines between `columns` × `rows` cells over the whole drawing, at most `most` along a side."""

    columns: int
    rows: int
    most: int

    @property
    def places(self) -> tuple[list[float], list[float]]:
        """Where its lines lie, of width and of height, from 0 to 1."""
        x, y = (
            [k / n for k in (*range(0, n, max(-(-n // self.most), 1)), n)]
            for n in (self.columns, self.rows)
        )
        return x, y


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels uint8 [h, w, 3], sent with at most `longest` CSS pixels a side."""

    pixels: np.ndarray
    longest: int
    x: float
    y: float
    width: float
    height: float


Shape = Box | Stroke | Curve | Ring | Word | Lattice | Picture


@dataclass(frozen=True)
class Drawing:
    """`label`: for who can't see it. `fixed`: drawn in its own size, else as wide as what holds it.

    One without words is as high as it says on any page, however narrow.
    """

    shapes: Sequence[Shape]
    height: float
    label: str
    width: float = WIDE
    fixed: bool = False
    style: str = ""

    @property
    def scales(self) -> bool:
        """Whether its height goes with its width."""
        return self.fixed or any(isinstance(s, Word | Ring) for s in self.shapes)


@dataclass(frozen=True)
class Styled:
    """Text set apart: `kind` is b, code, mark, span or small."""

    text: Any
    kind: str = "span"
    style: str = ""


@dataclass(frozen=True)
class Heading:
    """`level`: 1 of the page, 2 or 3 of a part. `verdict`: `good` or `bad`. `tags`: words behind it."""

    text: str
    level: int = 2
    verdict: str = ""
    tags: Sequence[Styled] = ()


@dataclass(frozen=True)
class Line:
    """A line of text, or of texts; `soft`: of less weight."""

    text: str | Sequence[str | Styled]
    soft: bool = False

    @property
    def texts(self) -> Sequence[str | Styled]:
        return [self.text] if isinstance(self.text, str) else self.text


@dataclass(frozen=True)
class Table:
    """Its cells are texts, numbers, Styled or small drawings."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    style: str = ""


@dataclass(frozen=True)
class Key:
    """Styles of boxes, or of curves, and what each stands for."""

    entries: Sequence[tuple[str, str]]
    curves: bool = False


@dataclass(frozen=True)
class Figure:
    """A small drawing with a title and a caption."""

    title: str
    drawing: Drawing
    caption: str
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """Small figures side by side; `style`: how wide they are on a page, `across`: of a line of a figure."""

    figures: Sequence[Figure]
    style: str = "mm-figures"
    across: int = 4


@dataclass(frozen=True)
class Card:
    """Parts with a frame around them."""

    parts: Sequence[Part]


@dataclass(frozen=True)
class Folded:
    """Parts behind a word that opens them; not in a figure. `title` "": on the page at once, not in a figure."""

    title: str
    parts: Sequence[Part]
    open: bool = False


@dataclass(frozen=True)
class Cell:
    """A token: its text, what lies below, what it is; `about`: what is said when it is pointed at; None: a head."""

    text: str
    style: str = ""
    about: str | None = None
    below: str = ""


@dataclass(frozen=True)
class Tokens:
    """Tokens side by side, a row per side below a row of their numbers; not in a figure."""

    label: str
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)


Part = Heading | Line | Table | Key | Drawing | Grid | Card | Folded | Tokens


def folded_table(title: str, head: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> Folded:
    """A table behind its title."""
    return Folded(title, [Table(head, rows)])
