"""The first differing frames of two videos side by side, decoded below the caller's root or from frames at hand.

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
from mmpack.view.media import thumbnail
from mmpack.view.parts import Figure, Grid, Line, Part, Styled

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

    def parts(self, pair: Pair, findings: Sequence[Finding]) -> list[Part]:
        """Both frames of each video of a sample whose frames differ."""
        found = [f.frames for f in findings if f.frames is not None]
        first = {(d.rollout.media_index, d.train.media_index): d for d in reversed(found)}
        return [part for places in sorted(first) for part in self._video(pair, first[places])]

    def _video(self, pair: Pair, difference: FrameDifference) -> list[Part]:
        name = f"media[{difference.rollout.media_index}]"
        if not self.left:
            return [Line(f"{name}: only frames of the first videos are drawn", soft=True)]
        self.left -= 2
        note = ""
        if difference.place is None:
            difference, note = self._search(pair, difference)
        if difference.place is None:
            return [Line(f"{name}: {note}", soft=True)]
        counts = [n for n in (difference.rollout.frames, difference.train.frames) if n is not None]
        differing = f"; {difference.differing} of {max(counts)} do" if difference.differing else ""
        first = Styled(f"{name}, frames[{difference.place}]", "b")
        return [
            Line([first, f" is the first that differs{differing}"]),
            *([Line(note, soft=True)] if note else []),
            Grid(list(self._both(pair, difference, difference.place)), "mm-two"),
        ]

    def _both(self, pair: Pair, difference: FrameDifference, place: int) -> Iterator[Figure]:
        for side, frame in zip(pair.sides, (difference.rollout, difference.train), strict=True):
            medium = side.sample.media[frame.media_index]
            pixels, note = self._thumbnail(medium, frame, place)
            label = f"{side.name}: {frame}"
            drawing = thumbnail(medium, pixels, LONGEST, label, 4 / 3, 5.0)
            seconds = "" if frame.timestamp is None else f"{frame.timestamp:.6g} s"
            when = " · ".join(filter(None, (seconds, frame.policy)))
            yield Figure(side.name, drawing, f"{frame} {when}", note)

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
