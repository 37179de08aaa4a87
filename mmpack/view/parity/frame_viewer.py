"""The first differing frames of two videos beside each other, decoded below the caller's root or from frames at hand.

Frames are uint8 [n, h, w, 3]. What can't be drawn is named, and a report decodes only a few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
from mmpack.view.media import data_uri
from mmpack.view.tags import Markup, joined, tag

MOST = 8  # thumbnails per report
SEARCHED = 64  # frames per side that are decoded to find the first with other pixels
AT_ONCE = 8
LONGEST = 320  # of a thumbnail, in CSS pixels
LIMITS = Limits(max_decoded_pixels=1 << 32, max_bytes=1 << 30)  # some 2,000 frames of 1080p

Found = tuple[np.ndarray | None, str]  # pixels, and a note about them


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
        found = [f.frames for f in findings if f.frames is not None]
        first = {(d.rollout.media_index, d.train.media_index): d for d in reversed(found)}
        return joined(self._video(pair, first[places]) for places in sorted(first))

    def _video(self, pair: Pair, difference: FrameDifference) -> Markup:
        name = f"media[{difference.rollout.media_index}]"
        if not self.left:
            return tag("p", f"{name}: only frames of the first videos are drawn", class_="mm-note")
        self.left -= 2
        note = ""
        if difference.place is None:
            difference, note = self._search(pair, difference)
        if difference.place is None:
            return tag("p", f"{name}: {note}", class_="mm-note")
        counts = [n for n in (difference.rollout.frames, difference.train.frames) if n is not None]
        differing = f"; {difference.differing} of {max(counts)} do" if difference.differing else ""
        return tag(
            "div",
            tag(
                "p",
                tag("b", f"{name}, frames[{difference.place}]"),
                f" is the first that differs{differing}",
            ),
            tag("p", note, class_="mm-note") if note else "",
            tag("div", *self._both(pair, difference, difference.place), class_="mm-two"),
            class_="mm-frames",
        )

    def _both(self, pair: Pair, difference: FrameDifference, place: int) -> Iterator[Markup]:
        """The figures of the two frames."""
        for side, frame in zip(pair.sides, (difference.rollout, difference.train), strict=True):
            medium = side.sample.media[frame.media_index]
            pixels, note = self._thumbnail(medium, frame, place)
            yield _figure(side.name, frame, pixels, note, _shape(medium, pixels))

    def _thumbnail(self, medium: Medium, frame: Frame, place: int) -> Found:
        if frame.frames is not None and place >= frame.frames:
            return None, f"no such frame: {frame.frames} in all"
        found, note = self.frames(medium, range(place, place + 1))
        return None if found is None else found[0], note

    def _search(self, pair: Pair, difference: FrameDifference) -> tuple[FrameDifference, str]:
        """Frames of equal indices and other pixels: which is the first, and by how much it differs."""
        media = [
            side.sample.media[frame.media_index]
            for side, frame in zip(pair.sides, (difference.rollout, difference.train), strict=True)
        ]
        counts = [0 if m.frame_indices is None else len(m.frame_indices) for m in media]
        stop = min(*counts, SEARCHED)
        if not stop:
            return difference, "frames have other pixels, and no frame_indices to find them by"
        for start in range(0, stop, AT_ONCE):
            places = range(start, min(start + AT_ONCE, stop))
            found = [self.frames(medium, places) for medium in media]
            one, two = (pixels for pixels, _ in found)
            if one is None or two is None:
                why = "; ".join(dict.fromkeys(note for pixels, note in found if pixels is None))
                return difference, f"frames have other pixels, and can't be compared: {why}"
            if one.shape != two.shape:
                return _at(pair, difference, start), f"frames of {_size(one)} against {_size(two)}"
            steps = np.abs(one.astype(np.int16) - two).reshape(len(one), -1).max(axis=1)
            if steps.any():
                k = int(np.argmax(steps > 0))
                note = f"largest difference of a pixel: {steps[k]} of 255"
                return _at(pair, difference, start + k), note
        return difference, (
            f"the first {stop} frames decode to equal pixels here: what made them differ is a decoder or a "
            "resize elsewhere"
        )

    def frames(self, medium: Medium, places: range) -> Found:
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


def _at(pair: Pair, difference: FrameDifference, place: int) -> FrameDifference:
    frames = [
        frame_of(side, frame.media_index, place)
        for side, frame in zip(pair.sides, (difference.rollout, difference.train), strict=True)
    ]
    return replace(difference, place=place, rollout=frames[0], train=frames[1])


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
