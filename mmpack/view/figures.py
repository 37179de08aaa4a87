"""The parts of a page as a figure for a paper: a PNG of 2,160 pixels width, in light colours. Units of two pixels."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from mmpack.view import parts as draw
from mmpack.view.sheet import Sheet

WIDTH, MARGIN = 1080, 40
GAP = 26.0  # between small figures of a line
ROWS = 12  # of a table
SIZES = {1: 24, 2: 18, 3: 15}  # of headings
PAPER = "#ffffff"
COLUMN = 640.0  # of a table: its widest


def figure(parts: Iterable[draw.Part]) -> bytes:
    """The PNG; what is folded, and tokens one by one, are left out.

    Raises: ArgumentError for a figure that is too high, MissingExtraError without Pillow.
    """
    sheet = Sheet(WIDTH, PAPER)
    sheet.y = MARGIN - 8
    _parts(sheet, parts)
    out = io.BytesIO()
    sheet.image(sheet.y + MARGIN - 12).save(out, "PNG")
    return out.getvalue()


def light_colours(sheet: str) -> dict[str, str]:
    """The variables of a style sheet of pages."""
    text = (Path(__file__).parent / "templates" / sheet).read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z]+):(#[0-9a-f]+)", text.partition("@media")[0]))


COLOURS = light_colours("parts.css")
INK, SOFT, RULE = COLOURS["fg"], COLOURS["soft"], COLOURS["line"]
LINES = ("bad", "image", "good", "video")  # colours of curves, in turn
MEANT = {f"line{k}": COLOURS[name] for k, name in enumerate(LINES)}
STROKES = {"mm-mean": COLOURS["bad"], "mm-mark": COLOURS["bad"], "mm-rule": RULE}
MEANT |= {"up": COLOURS["image"], "down": COLOURS["observation"]}


def _parts(sheet: Sheet, parts: Iterable[draw.Part]) -> None:
    for part in parts:
        if isinstance(part, draw.Card):
            _parts(sheet, part.parts)
        elif not isinstance(part, draw.Folded | draw.Tokens):
            _PARTS[type(part)](sheet, part)


def _plain(text: Any) -> str:
    return _plain(text.text) if isinstance(text, draw.Styled) else "" if text is None else str(text)


def _heading(sheet: Sheet, part: draw.Heading) -> None:
    size, words = SIZES[part.level], part.text
    if part.tags:
        words += f": {', '.join(map(_plain, part.tags))}"
    sheet.y += 0 if part.level == 1 else 16 if part.level == 2 else 4
    sheet.text(MARGIN, sheet.y, _one(sheet, words, size), size, COLOURS.get(part.verdict, INK))
    sheet.y += size + 12


def _line(sheet: Sheet, part: draw.Line) -> None:
    for text in sheet.wrapped("".join(map(_plain, part.texts)), 13, WIDTH - 2 * MARGIN, 6):
        sheet.text(MARGIN, sheet.y, text, 13, SOFT if part.soft else INK)
        sheet.y += 19
    sheet.y += 3


def _table(sheet: Sheet, part: draw.Table) -> None:
    lines = [part.head, *part.rows[:ROWS]]
    wide = [min(max(map(partial(_width, sheet), c)) + 24, COLUMN) for c in zip(*lines, strict=True)]
    shrink = min(1.0, (WIDTH - 2 * MARGIN) / sum(wide))
    right = MARGIN + sum(wide) * shrink
    for k, cells in enumerate(lines):
        x = float(MARGIN)
        for cell, width in zip(cells, wide, strict=True):
            if isinstance(cell, draw.Drawing):
                _shapes(sheet, cell, x, sheet.y + 3, shrink)
            else:
                (shown,) = sheet.wrapped(_plain(cell), 13, width * shrink - 12, 1)
                sheet.text(x, sheet.y, shown, 13, SOFT if k == 0 else INK)
            x += width * shrink
        sheet.y += 21
        sheet.rule(MARGIN, right, sheet.y - 3, RULE)
    more = len(part.rows) - ROWS
    sheet.y += 6
    if more > 0:
        _line(sheet, draw.Line(f"and {more:,} more", soft=True))


def _width(sheet: Sheet, cell: Any) -> float:
    return cell.width if isinstance(cell, draw.Drawing) else sheet.width(_plain(cell), 13)


def _key(sheet: Sheet, part: draw.Key) -> None:
    x = float(MARGIN)
    for style, name in part.entries:
        top = sheet.y + (7 if part.curves else 3)
        sheet.box((x, top, x + 11, top + (3 if part.curves else 11)), _fill(sheet, style), None)
        x = sheet.text(x + 17, sheet.y, name, 13, SOFT) + 18
    sheet.y += 24


def _drawing(sheet: Sheet, part: draw.Drawing) -> None:
    scale = (WIDTH - 2 * MARGIN) / draw.WIDE
    _shapes(sheet, part, MARGIN, sheet.y, scale)
    sheet.y += part.height * scale + 8


def _grid(sheet: Sheet, part: draw.Grid) -> None:
    wide = (WIDTH - 2 * MARGIN - (part.across - 1) * GAP) / part.across
    for k in range(0, len(part.figures), part.across):
        row = part.figures[k : k + part.across]
        heights = [
            _small(sheet, figure, MARGIN + i * (wide + GAP), wide) for i, figure in enumerate(row)
        ]
        sheet.y += max(heights) + 14


def _small(sheet: Sheet, figure: draw.Figure, x: float, wide: float) -> float:
    """Drawn at the sheet's place; its height."""
    scale = wide / figure.drawing.width
    sheet.text(x, sheet.y, sheet.wrapped(figure.title, 13, wide, 1)[0], 13, INK)
    top = sheet.y + 22
    _shapes(sheet, figure.drawing, x, top, scale)
    y = top + figure.drawing.height * scale + 2
    for text in sheet.wrapped(figure.caption, 11, wide, 2):
        sheet.text(x, y, text, 11, SOFT)
        y += 15
    return y - sheet.y


def _shapes(sheet: Sheet, drawing: draw.Drawing, left: float, top: float, scale: float) -> None:
    for shape in drawing.shapes:
        if isinstance(shape, draw.Stroke):
            ends = [(left + shape.x1 * scale, top + shape.y1 * scale)]
            ends.append((left + shape.x2 * scale, top + shape.y2 * scale))
            sheet.line(ends, STROKES.get(shape.style, SOFT), 1, dashed=shape.style == "mm-mean")
        elif isinstance(shape, draw.Word):
            _word(sheet, shape, left + shape.x * scale, top + shape.y * scale, scale)
        elif isinstance(shape, draw.Curve):
            points = [(left + x * scale, top + y * scale) for x, y in shape.points]
            width = 1 if shape.dashed else 2
            sheet.line(points, _fill(sheet, shape.style), width, shape.dashed)
        elif isinstance(shape, draw.Ring):
            at = (left + shape.x * scale, top + shape.y * scale)
            sheet.ring(at, 6, _fill(sheet, shape.style), 2)
        elif isinstance(shape, draw.Picture):
            at = (left + shape.x * scale, top + shape.y * scale)
            sheet.picture(shape.pixels, at, (shape.width * scale, shape.height * scale))
        elif isinstance(shape, draw.Box) and "mm-hit" not in shape.style:
            _box(sheet, shape, left, top, scale)


def _word(sheet: Sheet, word: draw.Word, x: float, y: float, scale: float) -> None:
    size = max(round(word.size * scale), 8)
    width = sheet.width(word.text, size)
    x -= {"start": 0.0, "middle": width / 2, "end": width}[word.anchor]
    colour = {"mm-soft": SOFT, "mm-mean": COLOURS["bad"]}.get(word.style, INK)
    sheet.text(x, y - 0.95 * size, word.text, size, colour)


def _box(sheet: Sheet, box: draw.Box, left: float, top: float, scale: float) -> None:
    if box.width <= 0 or box.height <= 0:
        return
    x, y = left + box.x * scale, top + box.y * scale
    corners = (x, y, x + box.width * scale, y + box.height * scale)
    framed = SOFT if "mm-box" in box.style else None
    sheet.box(corners, _fill(sheet, box.style), framed, box.round * scale)


def _fill(sheet: Sheet, style: str) -> str:
    names = [name.removeprefix("mm-") for name in style.split()]
    own = {"read": INK, "room": RULE, "box": COLOURS["card"], **MEANT}
    colour = own.get(names[0]) or COLOURS[names[0]]
    return sheet.mixed(colour, PAPER, 0.4) if "pale" in names else colour


def _one(sheet: Sheet, text: str, size: int) -> str:
    return sheet.wrapped(text, size, WIDTH - 2 * MARGIN, 1)[0]


_PARTS: dict[type[Any], Any] = {
    draw.Heading: _heading,
    draw.Line: _line,
    draw.Table: _table,
    draw.Key: _key,
    draw.Drawing: _drawing,
    draw.Grid: _grid,
}
