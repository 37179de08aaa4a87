"""Decoding by PyAV: the reference. Each run of packets is decoded from its keyframe to the last frame wanted in it.

Colours: swscale's fast path (chroma of the nearest sample) with the matrix and range that the stream names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from mmpack.errors import VideoError, require
from mmpack.video.files.container import Opened, Source, reading, rotation_of
from mmpack.video.files.packets import Packets


def refusal(video: Opened, packets: Packets) -> str | None:
    """None: what PyAV has opened, it decodes."""
    return None


def decode(
    source: Source, video: Opened, packets: Packets, frames: np.ndarray, threads: int
) -> np.ndarray:
    """uint8 [len(frames), h, w, 3], upright RGB. `frames`: distinct and ascending, at least one.

    Raises: VideoError where a frame has no picture, a broken one, or one of another size than the first.
    """
    convert = require("av.video.reformatter", "video", video.where).VideoReformatter().reformat
    out = stored = None
    with reading(video.where):
        for at, picture in _wanted(video, packets, frames):
            if stored is None:
                out, stored = _space(len(frames), picture, video.where)
            size = (picture.height, picture.width)
            if size != stored.shape[1:3]:
                raise VideoError(
                    f"{video.where}: frame {frames[at]} is {size[1]}×{size[0]}, but others are "
                    f"{stored.shape[2]}×{stored.shape[1]}. Fix: encode all frames in one size"
                )
            plane = convert(picture, format="rgb24", threads=1).planes[0]
            stored[at] = np.ndarray((*size, 3), np.uint8, plane, strides=(plane.line_size, 3, 1))
            # FFmpeg reuses its memory: what damage leaves out shows the picture that was there before
            del picture
    assert out is not None
    return out


def first_picture(video: Opened, packets: Packets) -> Any:
    """The picture of frame 0 (av.VideoFrame). Raises: VideoError where it can't be decoded."""
    with reading(video.where):
        return next(_wanted(video, packets, np.zeros(1, np.int64)))[1]


def _space(count: int, picture: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Room for `count` upright frames, and a view of it that is turned as the pictures are stored."""
    rotation = rotation_of(picture, where)
    size = (picture.height, picture.width)
    upright = size if rotation in (0, 180) else size[::-1]
    out = np.empty((count, *upright, 3), np.uint8)
    return out, np.rot90(out, rotation // 90, axes=(1, 2))


def _wanted(video: Opened, packets: Packets, frames: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(place in `frames`, picture) of each, in the order in which they are decoded."""
    if packets.named:
        assert packets.pts is not None
        names = packets.pts[packets.frames[frames]]
    else:
        names = frames
    places = {name: at for at, name in enumerate(names.tolist())}
    for run in packets.runs(frames):
        for number, picture in enumerate(_decoded(video, packets, run)):
            at = places.pop(picture.pts if packets.named else number, None)
            if at is not None:
                yield at, picture
            if not places:
                return
    if places:
        lost = frames[min(places.values())]
        raise VideoError(
            f"{video.where}: frame {lost} holds no picture. "
            "Fix: pass a whole video file, or encode it with keyframes"
        )


def _decoded(video: Opened, packets: Packets, run: tuple[int, int]) -> Iterator[Any]:
    """The pictures of one run of packets. Those before its keyframe lack what they refer to, and are left out."""
    first = packets.pts[run[0]] if packets.named and packets.pts is not None else None
    begun = first is None or not packets.shown[run[0]]
    for packet in chain(_demuxed(video, packets, *run), (None,)):
        for picture in video.stream.decode(packet):
            if first is not None and (picture.pts is None or picture.pts < first):
                continue
            if picture.is_corrupt:
                when = "a picture"
                if picture.pts is not None:  # its own time base may be unset
                    when = f"the picture at {float(picture.pts * packets.time_base):.3f} s"
                raise VideoError(f"{video.where}: {when} is broken. Fix: pass a whole video file")
            if not begun and picture.pts != first:
                raise VideoError(
                    f"{video.where}: packet {run[0]} of its video stream is marked as a keyframe, but holds no whole "
                    "picture (intra refresh). Fix: encode it with keyframes"
                )
            begun = True
            yield picture


def _demuxed(video: Opened, packets: Packets, start: int, stop: int) -> Iterator[Any]:
    """Packets [start, stop) of the file. With a coarse index a search lands before `start`, or behind it."""
    if start < 0:
        raise VideoError(
            f"{video.where}: a frame has no keyframe before it. Fix: pass a whole video file"
        )
    for key in np.flatnonzero(packets.keyframes[: start + 1])[::-1].tolist():
        video.container.seek(int(packets.times[key]), stream=video.stream)
        found = takewhile(lambda packet: packet.size, video.container.demux(video.stream))
        head = next(found, None)
        at = None if head is None else packets.place(head)
        if at is not None and at <= start:
            yield from islice(chain((head,), found), start - at, stop - at)
            return
    raise VideoError(
        f"{video.where}: packet {start} of its video stream can't be found again. "
        "Fix: pass a whole video file, remuxed to MP4 if it is whole"
    )
