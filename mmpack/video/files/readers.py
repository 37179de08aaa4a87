"""What each library reads of a video's clock: frames per second, number of frames, seconds. Nothing is decoded.

They disagree where a container keeps no exact times: the rate is the header's, or frames over the span of their times;
the count is the packets', or duration times rate. Each rule is applied to the header and the packets; its library need
not be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from mmpack.video.files.container import IN_MEMORY, Opened, Source, rotation_of
from mmpack.video.files.packets import Packets

_SEEK = 16  # frames before its target where OpenCV begins to look


@dataclass(frozen=True)
class Reading:
    """What one library reads of one video."""

    fps: float | None
    total_frames: int
    duration: float  # seconds; 0.0 where it is unknown
    # OpenCV: the frame that a seek to the end reaches; vLLM takes it where it is less than `total_frames`
    end_frames: int | None = None
    refusal: str | None = None  # why its frames are not those that mmpack counts
    end_refusal: str | None = (
        None  # the same where upstream has sought the end before, as vLLM does
    )

    def counted(self, checks_end: bool) -> tuple[int, float]:
        """Frames and seconds; `checks_end`: as vLLM corrects a count that goes beyond the end."""
        end = self.end_frames
        if checks_end and end is not None and self.fps and 0 < end < self.total_frames - 1:
            return end, end / self.fps
        return self.total_frames, self.duration


@dataclass(frozen=True)
class Reader:
    """A library as a row of `READERS`: its clock, and which frames it gives otherwise than mmpack counts them."""

    clock: Callable[[Opened, Packets], Reading]
    seeks: bool = False  # each frame by its time; the others decode from the first on
    turns: bool = True  # frames upright; by transformers and qwen-vl-utils two are never turned
    av1: bool = True  # has a decoder of it
    fields: bool = True  # one picture for each frame of an interlaced video
    unordered: bool = True  # finds frames where times lack or repeat
    open_groups: bool = True  # finds pictures that are shown before their keyframe
    lost: tuple[str, ...] = ()  # containers in which it does not find every frame
    takes: str = "best"  # of several video streams: the "best", the "first", or any "other"


def read_as(reader: str, video: Opened, packets: Packets, picture: Any = None) -> Reading:
    """What `reader` (a name of `READERS`) makes of header and packets; `picture`: see `unpaired`."""
    reading = READERS[reader].clock(video, packets)
    why = unpaired(reader, video, packets, picture)
    why = f"{reader} {why}" if why else _other_stream(reader, video)
    return reading if why is None else replace(reading, refusal=why)


def read_all(source: Source, video: Opened, packets: Packets, picture: Any) -> dict[str, Reading]:
    """Every reader's. torchcodec computes with the FFmpeg of the system: where it is installed, it is asked."""
    readings = {name: read_as(name, video, packets, picture) for name in READERS}
    readings["torchcodec"] = _asked(source, readings["torchcodec"])
    return readings


def unpaired(reader: str, video: Opened, packets: Packets, picture: Any = None) -> str | None:
    """Why `reader`, asked for a frame by its number, gives another one or one that is not upright; None: it does not.

    `picture`: frame 0 (av.VideoFrame). Without it, interlaced and rotated pictures are not looked at.
    """
    row, container = READERS[reader], video.container.format.name
    if not row.av1 and video.stream.codec_context.name in ("av1", "libdav1d"):
        return "has no decoder of AV1"
    if picture is not None:
        if not row.fields and picture.interlaced_frame:
            return "(5.0) gives one picture for every frame of an interlaced video"
        if not row.turns and rotation_of(picture, video.where):
            return "turns no frame upright, and this video is rotated"
    if not row.unordered and not packets.named:
        return "puts frames in the order of times that this file lacks or repeats"
    if not row.seeks:
        return None
    if not packets.named or not packets.shown.all():
        return "counts frames differently (an edit list hides some, or times repeat)"
    if container in row.lost:
        return f"does not find every frame of {container}"
    if not row.open_groups and packets.open_groups:
        return OPEN_GROUPS
    return None


def _container(video: Opened, packets: Packets) -> Reading:
    """The header's average rate, packets counted, the last frame's own duration."""
    rate, count, times = video.stream.average_rate, len(packets.frames), packets.timestamps
    fps = float(rate) if rate else None
    if times is None:
        return _by_rate(rate, count)
    last = float(packets.durations[packets.frames[-1]] * packets.time_base)
    if last <= 0:
        last = float(times[-1]) / (count - 1) if count > 1 else 1 / fps if fps else 0.0
    return Reading(fps, count, float(times[-1]) + last)


def _torchcodec(video: Opened, packets: Packets) -> Reading:
    """Frames over the time from the first to the end of the last."""
    times, base = _clock(video, packets)[packets.shown], packets.time_base
    ends = times + packets.durations[packets.shown]
    begin, end = (int(t) * base.numerator / base.denominator for t in (times.min(), ends.max()))
    rate, count = video.stream.average_rate, len(packets.frames)
    fps = count / (end - begin) if end != begin else float(rate) if rate else None
    return Reading(fps, count, end - begin)


def _opencv(video: Opened, packets: Packets) -> Reading:
    """The header's rate and count; without a count, duration times rate."""
    stream, base = video.stream, packets.time_base
    rate, tick = stream.average_rate or stream.base_rate, base.numerator / base.denominator
    fps = rate.numerator / rate.denominator if rate else 1 / tick
    count = stream.frames
    if not count:
        seconds = (video.container.duration or 0) / 1e6
        if seconds < 25e-6:
            seconds = (stream.duration or 0) * tick
        count = math.floor(seconds * fps + 0.5)
    end = _end_of_opencv(count, fps, video, packets)
    why = None
    if stream.codec_context.name == "theora" and len(packets.frames) < count:
        why = "OpenCV loses its place where Theora repeats a picture"
    lost = None
    mpegts = video.container.format.name == "mpegts"
    if mpegts and packets.pts is not None and not np.array_equal(packets.pts, packets.times):
        lost = "OpenCV does not find the first frames of mpegts again, for its frames are reordered"
    return Reading(fps, count, count / fps, end_frames=end, refusal=why, end_refusal=lost)


def _decord(video: Opened, packets: Packets) -> Reading:
    """The header's rate, packets counted."""
    rate = video.stream.average_rate
    why = None if rate else "decord can't read it: its header has no frame rate"
    return _by_rate(rate, len(packets.shown), why)


def _pyav(video: Opened, packets: Packets) -> Reading:
    """transformers' use of PyAV: the header's rate and count, even where the stream holds others."""
    rate, count = video.stream.average_rate, video.stream.frames
    why = None
    if not count or not rate:
        missing = "frame count" if rate else "frame rate"
        why = f"transformers can't read it by PyAV: its header has no {missing}"
    return _by_rate(rate, count, why)


def _torchvision(video: Opened, packets: Packets) -> Reading:
    """The header's rate; each frame of a time from 0 on."""
    rate, pts = video.stream.average_rate, packets.pts
    count = len(packets.frames)
    why = None if rate else "torchvision reads no frame rate: its header has none"
    if packets.named and pts is not None:
        count = int(np.count_nonzero(pts[packets.frames] >= 0))
        if count < len(packets.frames):
            why = "torchvision leaves out the frames before time 0"
    return _by_rate(rate, count, why)


def _by_rate(rate: Fraction | None, count: int, refusal: str | None = None) -> Reading:
    """What follows from the header's rate and a count of frames."""
    fps = float(rate) if rate else None
    return Reading(fps, count, count / fps if fps else 0.0, refusal=refusal)


READERS = {
    "torchcodec": Reader(_torchcodec, seeks=True, lost=("mpegts",)),
    "opencv": Reader(_opencv, av1=False, fields=False, takes="first"),
    "decord": Reader(
        _decord,
        seeks=True,
        av1=False,
        open_groups=False,
        lost=("mpegts", "avi", "asf"),
        takes="other",
    ),
    "pyav": Reader(_pyav, turns=False, takes="first"),
    "torchvision": Reader(_torchvision, turns=False, unordered=False, takes="first"),
    "container": Reader(_container),
}
OPEN_GROUPS = "loses the pictures that are shown before the keyframe in front of them (open GOPs)"


def _clock(video: Opened, packets: Packets) -> np.ndarray:
    """int64 [packets]: pts, or dts where the container has none (AVI's pts are made up by PyAV)."""
    if packets.pts is None or video.container.format.name == "avi":
        return packets.times
    return packets.pts


def _end_of_opencv(total: int, fps: float, video: Opened, packets: Packets) -> int:
    """The frame at which OpenCV stops on its way to frame `total`: a keyframe's number by its time, then counted."""
    base = packets.time_base
    tick = base.numerator / base.denominator
    clock, start = _clock(video, packets), video.stream.start_time or 0
    shown = np.sort(clock[packets.shown])
    keys = np.flatnonzero(packets.keyframes)

    def number(time: int) -> int:
        return int(fps * ((time - start) * tick) + 0.5)

    back = _SEEK
    while True:
        target = max(total - back, 0)
        time = start + int(target / fps / tick + 0.5)
        before = keys[packets.times[keys] <= time]
        landed = before[-1] if len(before) else keys[0] if len(keys) else 0
        left = shown[shown >= clock[landed]]
        left = left if len(left) else shown[-1:]
        first = number(int(left[0])) - number(int(shown[0]))
        if 0 <= first < total:
            return min(first + len(left), total)
        if not target:
            return total
        back = back * 3 // 2


def _other_stream(reader: str, video: Opened) -> str | None:
    """Why `reader` takes another video stream than mmpack does, or may; None: the same."""
    streams, takes = video.container.streams.video, READERS[reader].takes
    if takes == "first" and streams[0].index != video.stream.index:
        return (
            f"{reader} takes the first video stream, mmpack number {video.stream.index}, the best"
        )
    if takes == "other" and len(streams) > 1:
        return f"{reader} takes another of {len(streams)} video streams than the best"
    return None


def _asked(source: Source, mine: Reading) -> Reading:
    """What an installed torchcodec reads; without one, `mine`."""
    decoders = _loaded("torchcodec.decoders")
    if decoders is None:
        return mine
    file = bytes(source) if isinstance(source, IN_MEMORY) else os.fspath(source)
    try:
        about = decoders.VideoDecoder(file, seek_mode="exact").metadata
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[-160:]
        return replace(mine, refusal=f"torchcodec can't read it ({why})")
    fps = None if about.average_fps is None else float(about.average_fps)
    different = mine.refusal
    if different is None and about.num_frames != mine.total_frames:
        different = f"torchcodec's FFmpeg finds {about.num_frames} frames of {mine.total_frames}"
    return Reading(
        fps, about.num_frames or 0, float(about.duration_seconds or 0.0), refusal=different
    )


def _loaded(module: str) -> Any:
    """The module; None where it isn't installed, or FFmpeg's libraries are missing."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return None
