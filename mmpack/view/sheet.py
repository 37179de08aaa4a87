"""A sheet that grows downwards while it is drawn on, in units of half its pixels: boxes, lines, text, pictures.

The font is Pillow's own. It has Latin letters only: other characters are drawn as their escapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, require

if TYPE_CHECKING:
    from PIL.Image import Image

SCALE = 2  # pixels per unit
STEP = 800  # units by which the sheet grows
TALLEST = 16_000  # units
LETTERS = 1000  # of a line, which is wider than any sheet
PLAIN = {"Δ": "d", "×": "x", "→": "->", "–": "-", "−": "-", "⇥": " "}
DASH = (6.0, 4.0)

Point = tuple[float, float]


class Sheet:
    """`y`: where the next part begins, moved by whoever draws."""

    def __init__(self, width: int, paper: str) -> None:
        self._pillow = require("PIL.Image", "view", "a figure")
        self._draw = require("PIL.ImageDraw", "view", "a figure")
        self._colour = require("PIL.ImageColor", "view", "a figure")
        self._wide, self._paper = width, paper
        self._whole: Image = self._pillow.new("RGB", (width * SCALE, STEP * SCALE), paper)
        self._pen: Any = self._draw.Draw(self._whole)
        self.y = 0.0

    def image(self, height: float) -> Image:
        """The sheet down to `height`."""
        self._reach(height)
        return self._whole.crop((0, 0, self._whole.width, _px(height)))

    def text(self, x: float, y: float, text: str, size: int, colour: str) -> float:
        """Draw a line of text; where it ends."""
        self._reach(y + 2 * size)
        self._pen.text((_px(x), _px(y)), written(text), colour, _font(size * SCALE))
        return x + self.width(text, size)

    def outlined(self, x: float, y: float, text: str, size: int, colour: str, around: str) -> None:
        """Text that is seen on any picture."""
        options = {"stroke_width": 2 * SCALE, "stroke_fill": around}
        self._pen.text((_px(x), _px(y)), written(text), colour, _font(size * SCALE), **options)

    def width(self, text: str, size: int) -> float:
        """Width of a line of text."""
        return float(_font(size * SCALE).getlength(written(text))) / SCALE

    def wrapped(self, text: str, size: int, width: float, most: int) -> list[str]:
        """Lines no wider than `width`, cut at words where it can be; "…" after so many lines."""
        lines: list[str] = []
        for part in written(text, LETTERS * most).splitlines() or [""]:
            rest = part
            while rest:
                if len(lines) == most:
                    last = lines[-1].rstrip()
                    while last and self.width(f"{last}…", size) > width:
                        last = last[:-1]
                    lines[-1] = f"{last}…"
                    return lines
                count = self._fitting(rest, size, width)
                cut = count if count == len(rest) else rest.rfind(" ", 1, count) + 1 or count
                lines.append(rest[:cut])
                rest = rest[cut:]
        return lines or [""]

    def box(
        self,
        corners: tuple[float, float, float, float],
        fill: str | None,
        outline: str | None,
        radius: float = 0,
        width: float = 1,
    ) -> None:
        self._reach(corners[3])
        where = [_px(v) for v in corners]
        where[2] = max(where[2] - 1, where[0])
        where[3] = max(where[3] - 1, where[1])
        thick = _px(width)
        self._pen.rounded_rectangle(where, _px(radius), fill, outline, thick)

    def rule(self, left: float, right: float, y: float, colour: str) -> None:
        self.line([(left, y), (right, y)], colour, 1)

    def line(
        self, points: Sequence[Point], colour: str, width: float, dashed: bool = False
    ) -> None:
        self._reach(max(y for _, y in points))
        strokes = [list(points)] if not dashed else _dashes(points)
        for stroke in strokes:
            where = [(_px(x), _px(y)) for x, y in stroke]
            self._pen.line(where, colour, max(_px(width), 1), joint="curve")

    def ring(self, centre: Point, radius: float, colour: str, width: float) -> None:
        (x, y), r = centre, radius + width / 2
        self._reach(y + r)
        where = [_px(x - r), _px(y - r), _px(x + r), _px(y + r)]
        self._pen.ellipse(where, None, colour, max(_px(width), 1))
        dot = [_px(x - 1.5), _px(y - 1.5), _px(x + 1.5), _px(y + 1.5)]
        self._pen.ellipse(dot, colour)

    def picture(self, pixels: np.ndarray, at: Point, size: Point) -> None:
        """Pixels uint8 [h, w, 3], resized."""
        self._reach(at[1] + size[1])
        picture = self._pillow.fromarray(pixels)
        filter_ = self._pillow.Resampling.LANCZOS
        small = picture.resize((max(_px(size[0]), 1), max(_px(size[1]), 1)), filter_)
        self._whole.paste(small, (_px(at[0]), _px(at[1])))

    def mixed(self, colour: str, ground: str, share: float) -> str:
        """`share` of `colour` over `ground`."""
        one, two = self._colour.getrgb(colour), self._colour.getrgb(ground)
        mix = [round(a * share + b * (1 - share)) for a, b in zip(one, two, strict=True)]
        return "#" + "".join(f"{v:02x}" for v in mix)

    def _fitting(self, text: str, size: int, width: float) -> int:
        """How many characters fit, at least one."""
        low, high = 1, min(len(text), LETTERS)
        while low < high:
            middle = (low + high + 1) // 2
            if self.width(text[:middle], size) <= width:
                low = middle
            else:
                high = middle - 1
        return low

    def _reach(self, height: float) -> None:
        """Make the sheet as high. Raises: ArgumentError beyond TALLEST."""
        if _px(height) <= self._whole.height:
            return
        if height > TALLEST:
            raise ArgumentError(
                f"view.png: the figure is higher than {TALLEST * SCALE:,} pixels. Fix: draw fewer samples, by limit"
            )
        high = _px((int(height) // STEP + 2) * STEP)
        taller: Image = self._pillow.new("RGB", (self._wide * SCALE, high), self._paper)
        taller.paste(self._whole, (0, 0))
        self._whole, self._pen = taller, self._draw.Draw(taller)


def written(text: str, most: int = LETTERS) -> str:
    """What the font can draw of the first `most` characters, and of one more, so that the cut shows."""
    return "".join(_letter(c) for c in text[: most + 1])


@cache
def _letter(letter: str) -> str:
    if letter in PLAIN:
        return PLAIN[letter]
    if letter == "\n" or " " <= letter <= "~":
        return letter
    font = _font(20)
    same = font.getmask(letter), font.getmask("\uffff")
    lacks = same[0].size == same[1].size and bytes(same[0]) == bytes(same[1])
    return ascii(letter)[1:-1] if lacks or not letter.isprintable() else letter


@cache
def _font(size: int) -> Any:
    return require("PIL.ImageFont", "view", "a figure").load_default(size)


def _px(units: float) -> int:
    return round(units * SCALE)


def _dashes(points: Sequence[Point]) -> list[list[Point]]:
    out: list[list[Point]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        at = 0.0
        while at < length:
            a, b = at / length, min(at + DASH[0], length) / length
            out.append(
                [(x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)]
            )
            at += sum(DASH)
    return out
