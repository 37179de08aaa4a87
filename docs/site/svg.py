"""A drawing as SVG text: boxes, words, lines, brackets, in pixels. The same calls give the same bytes."""

from __future__ import annotations

from html import escape

INK, PALE = "#1b1f23", "#5f6b76"
# kind -> fill and line
COLOURS = {
    "text": ("#eceff1", "#78909c"),
    "image": ("#fff3e0", "#ef6c00"),
    "image2": ("#f3e5f5", "#8e24aa"),
    "loss": ("#e3f2fd", "#1e88e5"),
    "loss2": ("#e8f5e9", "#43a047"),
    "bad": ("#fdecea", "#c62828"),
    "none": ("#ffffff", "#b0bec5"),
}


class Drawing:
    """Parts of a picture, and its text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        kind: str = "text",
        text: str = "",
        **more: object,
    ) -> None:
        fill, line = COLOURS[kind]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" stroke="{line}"/>'
        )
        lines = text.split("\n") if text else []
        size = int(str(more.pop("size", 14)))
        for k, words in enumerate(lines):
            middle = y + h / 2 + size * 0.36 + (k - (len(lines) - 1) / 2) * size * 1.3
            self.text(x + w / 2, middle, words, size=size, anchor="middle", **more)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 14,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
        code: bool = False,
    ) -> None:
        style = f' fill="{colour}"' + ' font-weight="bold"' * bold
        style += ' font-family="Menlo, Consolas, monospace"' * code
        if anchor != "start":
            style += f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{style}>{escape(words)}</text>'
        )

    def line(
        self,
        *points: tuple[float, float],
        colour: str = PALE,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        more = ' marker-end="url(#arrow)"' * arrow + ' stroke-dasharray="4 3"' * dashed
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{more}/>'
        )

    def bracket(
        self, x0: float, x1: float, y: float, words: str, kind: str, *, code: bool = False
    ) -> None:
        """A span from x0 to x1 below a strip, with what it is under it."""
        line = COLOURS[kind][1]
        self.line((x0 + 2, y), (x0 + 2, y + 6), (x1 - 2, y + 6), (x1 - 2, y), colour=line)
        self.text((x0 + x1) / 2, y + 21, words, size=12, anchor="middle", colour=line, code=code)

    def strip(
        self,
        x: float,
        y: float,
        cells: list[tuple[str, str]],
        w: float = 44,
        h: float = 30,
        size: int = 13,
    ) -> None:
        """Cells of (words, kind), side by side."""
        for k, (words, kind) in enumerate(cells):
            self.box(x + k * w, y, w, h, kind, words, size=size)

    def numbers(
        self, x: float, y: float, values: list[object], w: float = 44, colour: str = PALE
    ) -> None:
        """Values in the middle of cells."""
        for k, value in enumerate(values):
            self.text(x + (k + 0.5) * w, y, str(value), size=12, anchor="middle", colour=colour)

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, sans-serif" role="img">\n  <title>{escape(self.title)}</title>\n'
            '  <defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{PALE}"/></marker></defs>\n'
            f'  <rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        )
        return head + "".join(f"  {part}\n" for part in self.parts) + "</svg>\n"
