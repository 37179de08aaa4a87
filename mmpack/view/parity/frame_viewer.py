"""The first differing frames of two videos beside each other, decoded below the caller's root or from frames at hand.

Frames are uint8 [n, h, w, 3]. What can't be shown is said, and a report decodes no more than a few.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmpack.errors import MmpackError
from mmpack.parity.causes.frame_choice import frame_of
from mmpack.parity.causes.pair import Pair
from mmpack.parity.frame_difference import Frame, FrameDifference
from mmpack.parity.report import Finding
from mmpack.processors.images import path_below
from mmpack.schema.media import Medium
from mmpack.video.decoding import decode
from mmpack.video.files.container import content_key
from mmpack.video.limits import Limits
from mmpack.view.parity.pictures import data_uri
from mmpack.view.parity.tags import Markup, joined, tag

MOST = 8  # thumbnails of a report
SEARCHED = 64  # frames of a side that are decoded to find the first of other pixels
AT_ONCE = 8
LONGEST = 320  # of a thumbnail, in CSS pixels
LIMITS = Limits(max_decoded_pixels=1 << 32, max_bytes=1 << 30)  # some 2,000 frames of 1080p

Found = tuple[np.ndarray | None, str]  # pixels, and what to say of them


class FrameViewer:
    """Draws first differing frames until `MOST` are drawn.

    `root`: folder below which `Medium.source` is opened. `known`: content_hash to the sampled frames.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None, known: Mapping[str, np.ndarray] | None
    ) -> None:
        self.root = None if root is None else Path(root)
        self.known = known or {}
        self.left = MOST
        self._keys: dict[Path, str] = {}

    def draw(self, pair: Pair, findings: Sequence[Finding]) -> Markup:
        """Both frames of each video of a sample whose frames differ."""
        parted = [f.frames for f in findings if f.frames is not None]
        first = {(d.rollout.media_index, d.train.media_index): d for d in reversed(parted)}
        return joined(self._video(pair, first[places]) for places in sorted(first))

    def _video(self, pair: Pair, parted: FrameDifference) -> Markup:
        name = f"media[{parted.rollout.media_index}]"
        if not self.left:
            return tag("p", f"{name}: frames are drawn of the first videos alone", class_="mm-note")
        self.left -= 2
        told = ""
        if parted.place is None:
            parted, told = self._searched(pair, parted)
        if parted.place is None:
            return tag("p", f"{name}: {told}", class_="mm-note")
        figures, shapes = [], []
        for side, frame in zip(pair.sides, (parted.rollout, parted.train), strict=True):
            medium = side.sample.media[frame.media_index]
            pixels, note = self._thumbnail(medium, frame, parted.place)
            shapes.append(_shape(medium, pixels))
            figures.append((side.name, frame, pixels, note))
        counts = [n for n in (parted.rollout.frames, parted.train.frames) if n is not None]
        differing = "" if parted.differing is None else f"; {parted.differing} of {max(counts)} do"
        return tag(
            "div",
            tag(
                "p",
                tag("b", f"{name}, frames[{parted.place}]"),
                f" is the first that differs{differing}",
            ),
            tag("p", told, class_="mm-note") if told else "",
            tag(
                "div",
                *(_figure(*f, shape) for f, shape in zip(figures, shapes, strict=True)),
                class_="mm-two",
            ),
            class_="mm-frames",
        )

    def _thumbnail(self, medium: Medium, frame: Frame, place: int) -> Found:
        if frame.frames is not None and place >= frame.frames:
            return None, f"no such frame: {frame.frames} in all"
        found, note = self._frames(medium, range(place, place + 1))
        return None if found is None else found[0], note

    def _searched(self, pair: Pair, parted: FrameDifference) -> tuple[FrameDifference, str]:
        """Frames of equal indices and other pixels: which is the first, and by how much it differs."""
        media = [
            side.sample.media[frame.media_index]
            for side, frame in zip(pair.sides, (parted.rollout, parted.train), strict=True)
        ]
        counts = [0 if m.frame_indices is None else len(m.frame_indices) for m in media]
        stop = min(*counts, SEARCHED)
        for start in range(0, stop, AT_ONCE):
            places = range(start, min(start + AT_ONCE, stop))
            found = [self._frames(medium, places) for medium in media]
            one, two = (pixels for pixels, _ in found)
            if one is None or two is None:
                why = dict.fromkeys(note for pixels, note in found if pixels is None)
                return parted, f"frames have other pixels, and can't be compared: {'; '.join(why)}"
            if one.shape != two.shape:
                return _at(pair, parted, start), f"frames of {_size(one)} against {_size(two)}"
            apart = np.abs(one.astype(np.int16) - two).reshape(len(one), -1).max(axis=1)
            if apart.any():
                k = int(np.argmax(apart > 0))
                return _at(
                    pair, parted, start + k
                ), f"largest difference of a pixel: {apart[k]} of 255"
        if not stop:
            return parted, "frames have other pixels, and no frame_indices to find them by"
        return parted, (
            f"the first {stop} frames decode to equal pixels here: what made them differ is a decoder or a "
            "resize elsewhere"
        )

    def _frames(self, medium: Medium, places: range) -> Found:
        """uint8 [n, h, w, 3] at these places of the chosen frames."""
        held = self.known.get(medium.content_hash or "")
        if held is not None and held.ndim == 4 and places.stop <= len(held):
            return held[places.start : places.stop], ""
        if self.root is None:
            return None, "no folder of media was given"
        if medium.source is None:
            return None, "no source recorded"
        if medium.frame_indices is None:
            return None, "no frame_indices recorded"
        chosen = np.asarray(medium.frame_indices)[places.start : places.stop]
        try:
            path, _ = path_below(medium.source, self.root, "frames")
            pixels = decode(path, chosen, limits=LIMITS)
            same = medium.file_hash in (None, self._key(path))
        except MmpackError as error:
            return None, str(error)
        return pixels, "" if same else "the file is not the one recorded"

    def _key(self, path: Path) -> str:
        if path not in self._keys:
            self._keys[path] = content_key(path)
        return self._keys[path]


def _at(pair: Pair, parted: FrameDifference, place: int) -> FrameDifference:
    frames = [
        frame_of(side, frame.media_index, place)
        for side, frame in zip(pair.sides, (parted.rollout, parted.train), strict=True)
    ]
    return replace(parted, place=place, rollout=frames[0], train=frames[1])


def _size(frames: np.ndarray) -> str:
    return f"{frames.shape[2]} × {frames.shape[1]} px"


def _shape(medium: Medium, pixels: np.ndarray | None) -> tuple[float, float]:
    """Width and height of a thumbnail."""
    width, height = 4, 3
    if pixels is not None:
        height, width = pixels.shape[:2]
    elif medium.size is not None and min(medium.size) > 0:
        width, height = medium.size
    ratio = min(max(width / height, 0.2), 5.0)
    return (LONGEST, LONGEST / ratio) if ratio >= 1 else (LONGEST * ratio, LONGEST)


def _figure(
    name: str, frame: Frame, pixels: np.ndarray | None, note: str, shape: tuple[float, float]
) -> Markup:
    box = {"width": f"{shape[0]:.1f}", "height": f"{shape[1]:.1f}"}
    drawn = (
        tag("rect", class_="mm-video mm-empty", **box)
        if pixels is None
        else tag("image", href=data_uri(pixels, LONGEST), preserveAspectRatio="none", **box)
    )
    drawing = tag(
        "svg",
        drawn,
        view_box=f"0 0 {box['width']} {box['height']}",
        role="img",
        aria_label=f"{name}: {frame}",
        **box,
    )
    seconds = "" if frame.timestamp is None else f"{frame.timestamp:.6g} s"
    lines = [tag("b", name), f" {frame}", tag("br"), seconds]
    if frame.policy:
        lines += [" · " if seconds else "", frame.policy]
    if note:
        lines += [tag("br"), tag("span", note, class_="mm-note")]
    return tag("figure", drawing, tag("figcaption", *lines))
