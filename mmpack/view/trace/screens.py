"""The media of a sample as figures: the picture, or its shape where there is none, with boxes, clicks and paths on it.

A picture is in the page once, however often it is drawn. Pixels are uint8 [h, w, 3].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.families import FAMILIES
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.view.media import finder
from mmpack.view.parity.frame_viewer import FrameViewer
from mmpack.view.parts import Lattice
from mmpack.view.trace.choose import Options
from mmpack.view.trace.episodes import Node
from mmpack.view.trace.places import Mark, marks_of, system_read

HEIGHT, WIDEST = 270.0, 500.0  # of a figure, in CSS pixels
FILM = 118.0  # height of a picture in the strip of a trajectory
SHOWN = 12  # media of a sample
TOTAL, LEAST = 1_800_000, 9_000  # bytes of all pictures of a page, and of one
SIZES = (1280, 960, 640, 448, 320, 200)  # longest side in pixels that are tried
DENSE = 0.06  # bytes per pixel of a square that a screen takes at least
CELLS = 48  # grid lines along one side


# a medium -> its picture or None, width over height (0: unknown), and what to say about it
Look = Callable[[Medium], tuple[Any, float, str]]


class Pictures:
    """Pixels of media; `missing`: of those that have none why, by media_id."""

    def __init__(self, options: Options) -> None:
        self._find = finder(options.media_root, options.pictures)
        self._frames = FrameViewer(options.media_root, options.pictures)
        self.missing: dict[str, str] = {}

    def look(self, medium: Medium) -> tuple[np.ndarray | None, float, str]:
        """See `Look`: the picture, or the frame in the middle of a video."""
        pixels, note = self._find(medium)
        if pixels is None and medium.modality == "video":
            middle = (0 if medium.frame_indices is None else len(medium.frame_indices)) // 2
            frames, note = self._frames.frames(medium, range(middle, middle + 1))
            pixels = None if frames is None else frames[0]
        if pixels is None:
            self.missing[medium.media_id] = note or "no file"
            return None, 0.0, note
        return pixels, pixels.shape[1] / pixels.shape[0], note


class Album:
    """The pictures of a page. `count`: how many media there are at most, which share the bytes of the page."""

    def __init__(self, pictures: Pictures, count: int) -> None:
        self.pictures = pictures
        self.most = max(TOTAL // max(count, 1), LEAST)
        self._known: dict[str, tuple[str | None, float, str]] = {}
        self.addresses: list[str] = []  # of every picture that was looked at

    def look(self, medium: Medium) -> tuple[str | None, float, str]:
        """See `Look`; the picture is its id in the page."""
        key = f"{medium.cache_key} {medium.content_hash} {medium.source}"
        if key not in self._known:
            pixels, ratio, note = self.pictures.look(medium)
            name = None if pixels is None else f"p{len(self.addresses)}"
            if pixels is not None:
                self.addresses.append(encoded(pixels, self.most))
            self._known[key] = (name, ratio, note)
        return self._known[key]


@dataclass(frozen=True)
class Screen:
    """A medium as it is drawn, at its size, with its marks; and what stands below it."""

    index: int
    modality: str
    picture: Any  # its id in the page, or its pixels in a figure
    width: float
    height: float
    lattice: Lattice
    marks: list[Mark]
    label: str
    name: str
    facts: list[str]
    note: str


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


def screen_of(
    sample: Sample,
    index: int,
    marks: Sequence[Mark],
    look: Look,
    high: float = HEIGHT,
    wide: float = WIDEST,
) -> Screen:
    """The picture, or its shape with the grid, with those of the marks that are on it; at most so high and wide."""
    medium = sample.media[index]
    own = [mark for mark in marks if mark.media_index == index]
    picture, ratio, note = look(medium)
    columns, rows = cells(sample, medium)
    ratio = min(max(ratio or shape_of(medium, columns, rows), 0.2), 5.0)
    width, height = min(high * ratio, wide), min(high, wide / ratio)
    words = "; ".join(f"{m.letter} {m.text}" for m in own)
    label = f"{medium.modality} {index}, {medium.media_id}" + (f": {words}" if words else "")
    if medium.modality == "audio":
        note = ""
    elif own and sample.coordinate_system is None:
        note = f"no coordinate_system: read as {system_read(sample)}, as {sample.family} writes. {note}"
    lattice, name = Lattice(columns, rows, CELLS), medium.source or medium.media_id
    facts = _facts(medium, columns, rows)
    return Screen(
        index, medium.modality, picture, width, height, lattice, own, label, name, facts, note
    )


def _facts(medium: Medium, columns: int, rows: int) -> list[str]:
    t, tokens = medium.grid_thw[0], f"{medium.num_tokens:,} tokens"
    if medium.modality == "audio":
        rate = "" if medium.sampling_rate is None else f" at {medium.sampling_rate:,} Hz"
        count = "" if medium.num_samples is None else f"{medium.num_samples:,} samples{rate} · "
        return [f"{count}{t:,} frames = {tokens}"]
    size = "" if medium.size is None else f"{medium.size[0]} × {medium.size[1]} px · "
    facts = [f"{size}{f'{t} × ' if t > 1 else ''}{rows} × {columns} = {tokens}"]
    if medium.modality == "video" and medium.frame_indices is not None:
        facts.append(f"the middle of {len(medium.frame_indices)} frames")
    return facts


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
