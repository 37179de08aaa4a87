"""The media of a sample as figures: the picture, or its shape where there is none, with boxes, clicks and paths on it.

A picture is in the page once, however often it is drawn. Pixels are uint8 [h, w, 3].
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.families import FAMILIES
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.view.media import Find
from mmpack.view.parity.frame_viewer import FrameViewer
from mmpack.view.tags import Markup, joined, tag
from mmpack.view.trace.episodes import Node
from mmpack.view.trace.places import Mark, marks_of, system_read

HEIGHT, WIDEST = 270.0, 500.0  # of a figure, in CSS pixels
FILM = 118.0  # height of a picture in the strip of a trajectory
SHOWN = 12  # media of a sample
TOTAL, LEAST = 1_800_000, 9_000  # bytes of all pictures of a page, and of one
SIZES = (1280, 960, 640, 448, 320, 200)  # longest side in pixels that are tried
DENSE = 0.06  # bytes per pixel of a square that a screen takes at least
CELLS = 48  # grid lines along one side


class Album:
    """The pictures of a page. `count`: how many media there are at most, which share the bytes of the page."""

    def __init__(self, find: Find, frames: FrameViewer, count: int) -> None:
        self.find, self.frames = find, frames
        self.most = max(TOTAL // max(count, 1), LEAST)
        self.missing: dict[str, str] = {}  # media_id -> why
        self._known: dict[str, tuple[str | None, float, str]] = {}
        self._symbols: list[Markup] = []

    def look(self, medium: Medium) -> tuple[str | None, float, str]:
        """Id of the picture in the page or None, width over height (0: unknown), and what to say about it."""
        key = f"{medium.cache_key} {medium.content_hash} {medium.source}"
        if key not in self._known:
            pixels, note = pixels_of(medium, self.find, self.frames)
            name, ratio = None, 0.0
            if pixels is None:
                self.missing[medium.media_id] = note or "no file"
            else:
                name, ratio = f"p{len(self._symbols)}", pixels.shape[1] / pixels.shape[0]
                image = tag(
                    "image",
                    href=encoded(pixels, self.most),
                    width="100",
                    height="100",
                    preserveAspectRatio="none",
                )
                symbol = {"id": name, "view_box": "0 0 100 100", "preserveAspectRatio": "none"}
                self._symbols.append(tag("symbol", image, **symbol))
            self._known[key] = (name, ratio, note)
        return self._known[key]

    def symbols(self) -> Markup:
        """Every picture that was looked at, not seen by itself."""
        options = {"width": "0", "height": "0", "class_": "symbols", "aria_hidden": "true"}
        return tag("svg", *self._symbols, **options)


def pixels_of(medium: Medium, find: Find, frames: FrameViewer) -> tuple[np.ndarray | None, str]:
    """The picture, or the frame in the middle of a video; and what to say about it."""
    pixels, note = find(medium)
    if pixels is not None or medium.modality != "video":
        return pixels, note
    count = 0 if medium.frame_indices is None else len(medium.frame_indices)
    found, note = frames.frames(medium, range(count // 2, count // 2 + 1))
    return (None if found is None else found[0]), note


def encoded(pixels: np.ndarray, most: int) -> str:
    """A `data:` address of at most so many bytes, unless the smallest size has more: PNG if that fits, else JPEG."""
    image = require("PIL.Image", "view", "a picture").fromarray(pixels)
    data, room = b"", most * 3 // 4  # base64
    first = next((side for side in SIZES if side**2 <= room / DENSE), SIZES[-1])
    for longest in [side for side in SIZES if side <= first]:
        image.thumbnail((longest, longest))
        for kind in ("png", "jpeg") if longest == first else ("jpeg",):
            out = io.BytesIO()
            image.save(out, kind.upper(), quality=82)
            data = out.getvalue()
            if len(data) <= room:
                return _uri(kind, data)
    return _uri("jpeg", data)


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def figures(
    sample: Sample, number: int, indices: Sequence[int], marks: Sequence[Mark], album: Album
) -> Markup:
    """The media of these indices with their marks, as a strip; `number`: of the sample in the page."""
    if not indices:
        return Markup("")
    drawn = [
        _figure(sample, number, i, [m for m in marks if m.media_index == i], album)
        for i in indices[:SHOWN]
    ]
    more = len(indices) - SHOWN
    left = tag("p", f"{more} more media", class_="note") if more > 0 else ""
    return tag("div", *drawn, left, class_="strip")


def film(frames: Sequence[tuple[Sample, int, int, str, Sequence[Mark]]], album: Album) -> Markup:
    """A trajectory as a strip of small screens, each a link to its figure.

    `frames`: sample, its number, index of the medium, what stands below it, and the marks of that sample.
    """
    items = []
    for sample, number, index, words, marks in frames:
        here = [m for m in marks if m.media_index == index]
        drawing = _drawing(sample, index, here, album, FILM, 2 * FILM)
        items.append(tag("a", drawing, tag("span", tag("b", words)), href=f"#s{number}m{index}"))
    return tag("div", *items, class_="film", role="group", aria_label="screens of the trajectory")


def _figure(sample: Sample, number: int, index: int, marks: Sequence[Mark], album: Album) -> Markup:
    caption = _caption(sample, index, marks, album.look(sample.media[index])[2])
    return tag(
        "figure",
        _drawing(sample, index, marks, album, HEIGHT, WIDEST),
        tag("figcaption", *caption),
        id=f"s{number}m{index}",
        tabindex="0",
    )


def _drawing(
    sample: Sample, index: int, marks: Sequence[Mark], album: Album, high: float, wide: float
) -> Markup:
    """The picture, or its shape with the grid, and the marks on it; at most so high and wide."""
    medium = sample.media[index]
    name, ratio, _ = album.look(medium)
    columns, rows = cells(sample, medium)
    ratio = min(max(ratio or shape_of(medium, columns, rows), 0.2), 5.0)
    width, height = min(high * ratio, wide), min(high, wide / ratio)
    box = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    if name is not None:
        back = tag("use", href=f"#{name}", **box)
    else:
        blank = tag("rect", class_=f"blank {medium.modality}", **box)
        back = joined([blank, _grid(columns, rows, width, height)])
    words = "; ".join(f"{m.letter} {m.text}" for m in marks)
    label = f"{medium.modality} {index}, {medium.media_id}" + (f": {words}" if words else "")
    return tag(
        "svg",
        back,
        *(drawn_mark(mark, width, height) for mark in marks),
        view_box=f"0 0 {box['width']} {box['height']}",
        role="img",
        aria_label=label,
        **box,
    )


def _caption(sample: Sample, index: int, marks: Sequence[Mark], note: str) -> list[Any]:
    medium = sample.media[index]
    columns, rows = cells(sample, medium)
    if medium.modality == "audio":
        rate = "" if medium.sampling_rate is None else f" at {medium.sampling_rate:,} Hz"
        count = "" if medium.num_samples is None else f"{medium.num_samples:,} samples{rate} · "
        what = f"{count}{medium.grid_thw[0]:,} frames = {medium.num_tokens:,} tokens"
        name = medium.source or medium.media_id
        return [tag("b", f"media[{index}] "), name, tag("small", what)]
    size = "" if medium.size is None else f"{medium.size[0]} × {medium.size[1]} px · "
    t = medium.grid_thw[0]
    grid = f"{t} × " if t > 1 else ""
    lines = [
        tag("b", f"media[{index}] "),
        medium.source or medium.media_id,
        tag("small", f"{size}{grid}{rows} × {columns} = {medium.num_tokens:,} tokens"),
    ]
    if medium.modality == "video" and medium.frame_indices is not None:
        lines.append(tag("small", f"the middle of {len(medium.frame_indices)} frames"))
    if marks:
        lines.append(tag("ul", *(_legend(mark) for mark in marks), class_="marks"))
        if sample.coordinate_system is None:
            note = f"no coordinate_system: read as {system_read(sample)}, as {sample.family} writes. {note}"
    if note:
        lines.append(tag("small", note, class_="note"))
    return lines


def _legend(mark: Mark) -> Markup:
    where = " (outside the picture)" if mark.outside else ""
    kind = "target " if mark.role == "target" else ""
    return tag("li", tag("b", mark.letter, class_=f"key {mark.role}"), f" {kind}{mark.text}{where}")


def cells(sample: Sample, medium: Medium) -> tuple[int, int]:
    """Columns and rows of the grid after merging; of an audio one row of its tokens."""
    if medium.modality == "audio":
        return max(medium.num_tokens, 1), 1
    merge = FAMILIES[sample.family].spatial_merge_size
    _, h, w = medium.grid_thw
    return max(w // merge, 1), max(h // merge, 1)


def shape_of(medium: Medium, columns: int, rows: int) -> float:
    """Width over height of a medium whose pixels are not here."""
    if medium.size is not None and min(medium.size) > 0:
        return medium.size[0] / medium.size[1]
    return columns / rows


def _grid(columns: int, rows: int, width: float, height: float) -> Markup:
    path = "".join(
        [f"M{k * width / columns:.1f} 0V{height:.1f}" for k in _lines(columns)]
        + [f"M0 {k * height / rows:.1f}H{width:.1f}" for k in _lines(rows)]
    )
    return tag("path", d=path, class_="grid")


def _lines(count: int) -> list[int]:
    step = max(-(-count // CELLS), 1)
    return [*range(0, count, step), count]


def new_marks(node: Node) -> list[Mark]:
    """The targets, and what the sample's own tokens speak of."""
    return [m for m in marks_of(node.sample) if m.token is None or m.token >= node.shared]


def new_media(node: Node, marks: Sequence[Mark]) -> list[int]:
    """Those that first appear after the shared tokens, and those of new marks; all that have no place too."""
    first: dict[int, int] = {}
    for span in node.sample.modality_spans:
        first[span.media_index] = min(first.get(span.media_index, span.start), span.start)
    marked = {m.media_index for m in marks if m.token is not None}
    return [
        i
        for i in range(len(node.sample.media))
        if node.parent is None or i in marked or first.get(i, node.shared) >= node.shared
    ]


# ---- marks ---------------------------------------------------------------------------------------


def drawn_mark(mark: Mark, width: float, height: float) -> Markup:
    """A mark on a drawing of this size: twice, so that it is seen on any picture; points outside at its edge."""
    points = [at_edge(point, width, height) for point in mark.points]
    parts: list[Markup] = []
    for class_ in ("halo", "line"):
        parts += [tag(name, class_=class_, **shape) for name, shape in _shapes(mark, points)]
    x, y = label_place(mark, points, width, height)
    parts.append(tag("text", mark.letter, x=f"{x:.1f}", y=f"{y:.1f}"))
    return tag("g", tag("title", f"{mark.letter} {mark.text}"), *parts, class_=f"mark {mark.role}")


def at_edge(point: tuple[float, float], width: float, height: float) -> tuple[float, float]:
    """In units of the drawing, within it."""
    return min(max(point[0], 0.0), 1.0) * width, min(max(point[1], 0.0), 1.0) * height


def label_place(
    mark: Mark, points: Sequence[tuple[float, float]], width: float, height: float
) -> tuple[float, float]:
    """Where the letter of a mark begins: above a box, to the right of a click; within the drawing.

    A point of a region is mostly that of a click: its letter stands lower, so that "1" and "r0" don't read "10".
    """
    (x, y), room = points[0], 7.0 * len(mark.letter) + 5
    if mark.shape == "box":
        x = points[1][0] - room + 4 if mark.role == "target" else x + 1
        y = y - 4 if y > 16 else points[1][1] + 13
    else:
        x = x + 11 if x + 11 + room < width else x - 11 - room
        y = y - 8 if mark.role == "action" else y + 16
    return min(max(x, 2.0), max(width - room, 2.0)), min(max(y, 12.0), height - 3)


def _shapes(mark: Mark, points: Sequence[tuple[float, float]]) -> list[tuple[str, dict[str, str]]]:
    """Names and sizes of SVG elements."""
    if mark.shape == "box":
        (x0, y0), (x1, y1) = points
        sides = {"width": f"{max(x1 - x0, 1):.1f}", "height": f"{max(y1 - y0, 1):.1f}"}
        return [("rect", {"x": f"{x0:.1f}", "y": f"{y0:.1f}", **sides})]
    x, y = points[0]
    ring = ("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "7"})
    cross = ("path", {"d": f"M{x - 2:.1f} {y:.1f}h4M{x:.1f} {y - 2:.1f}v4"})
    if mark.shape != "path":
        return [ring, cross]
    line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    head = "".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for (a, b), (c, d) in arrow_head(points))
    return [ring, ("path", {"d": line + head})]


def arrow_head(
    points: Sequence[tuple[float, float]], length: float = 10.0
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Two strokes from the last point backwards."""
    (x0, y0), (x1, y1) = points[-2], points[-1]
    angle = math.atan2(y1 - y0, x1 - x0)
    return [
        ((x1, y1), (x1 - length * math.cos(angle + turn), y1 - length * math.sin(angle + turn)))
        for turn in (0.5, -0.5)
    ]
