"""The packets of a video stream in the order of the file: which frame each holds, and where decoding may begin.

Frame i is the i-th in presentation order; with B-frames that is another order than that of the packets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from mmpack.errors import VideoError
from mmpack.video.files.container import Opened
from mmpack.video.limits import Limits

_DAY = 24 * 60 * 60  # seconds


@dataclass(frozen=True)
class Packets:
    """Arrays [packets] in the order of the file; times in ticks of `time_base` seconds."""

    pts: np.ndarray | None  # int64; None where the container has none
    times: np.ndarray  # int64: dts, or pts where the container has no dts
    durations: np.ndarray  # int64, 0 where unknown
    keyframes: np.ndarray  # bool
    shown: np.ndarray  # bool; an edit list hides those that only serve to decode others
    time_base: Fraction
    named: bool  # `pts` identify the decoder's pictures

    @cached_property
    def frames(self) -> np.ndarray:
        """int64 [frames]: the packet of each frame."""
        shown = np.flatnonzero(self.shown)
        return shown if self.pts is None else shown[np.argsort(self.pts[shown], kind="stable")]

    @cached_property
    def timestamps(self) -> np.ndarray | None:
        """float64 [frames], seconds from the first frame."""
        if self.pts is None:
            return None
        ticks = self.pts[self.frames].astype(np.float64)
        return (ticks - ticks[0]) * self.time_base.numerator / self.time_base.denominator

    def runs(self, frames: np.ndarray) -> list[tuple[int, int]]:
        """The packets to decode for `frames`: disjoint [start, stop), ascending; start −1: no keyframe before."""
        if not self.named:  # which packet holds a picture shows when it comes out
            return [(int(self.starts[0]), len(self.keyframes))]
        runs: list[tuple[int, int]] = []
        wanted = self.frames[frames]
        for start, packet in sorted(
            zip(self.starts[wanted].tolist(), wanted.tolist(), strict=True)
        ):
            if runs and start < runs[-1][1]:
                runs[-1] = (runs[-1][0], max(runs[-1][1], packet + 1))
            else:
                runs.append((start, packet + 1))
        return runs

    def place(self, packet: Any) -> int | None:
        """Which of the packets this one is (av.Packet, read again)."""
        known, time = (self.pts, packet.pts) if self.named else (self.times, packet.dts)
        if time is None:
            return None
        places = np.flatnonzero(known == time)
        return int(places[0]) if len(places) else None

    @cached_property
    def _last_keyframe(self) -> np.ndarray:
        """int64 [packets]: the keyframe in front of each, or itself; −1: none."""
        return np.maximum.accumulate(np.where(self.keyframes, np.arange(len(self.keyframes)), -1))

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [packets]: the packet from which each can be decoded; −1: none."""
        last = self._last_keyframe
        if not self.named:  # pictures are counted from the first on
            return np.full_like(last, last[0])
        assert self.pts is not None
        starts, before = last, np.concatenate([[-1], last[:-1]])
        while (leading := (starts >= 0) & (self.pts < self.pts[starts])).any():
            starts = np.where(leading, before[starts], starts)
        return starts

    @property
    def open_groups(self) -> bool:
        """Pictures that are shown before the keyframe in front of them, and need the one before that."""
        return not np.array_equal(self.starts, self._last_keyframe)


def read_packets(video: Opened, limits: Limits) -> Packets:
    """All packets of the stream; nothing is decoded.

    Raises: VideoError where there are none, more than the limit, or fewer than the container's index says.
    """
    columns: list[Any] = [np.array(column) for column in zip(*_rows(video, limits), strict=True)]
    pts, times, durations, keyframes, shown = columns
    if times.dtype == object or _jumps(times, video):
        raise VideoError(
            f"{video.where}: some frames have no usable time (those before 0 have none in Matroska and FLV). "
            "Fix: write it with times from 0 on, as ffmpeg -avoid_negative_ts make_zero does"
        )
    # AVI has no pts: FFmpeg counts the packets, which gives the times, but not of which picture
    guessed = video.container.format.name == "avi" and video.stream.codec_context.has_b_frames
    timed = pts.dtype != object
    named = timed and not guessed and len(np.unique(pts[shown])) == np.count_nonzero(shown)
    if timed and guessed:
        pts = np.sort(pts)
    return Packets(
        pts=pts if timed else None,
        times=times,
        durations=durations,
        keyframes=keyframes,
        shown=shown,
        time_base=video.stream.time_base,
        named=bool(named),
    )


def _jumps(times: np.ndarray, video: Opened) -> bool:
    """Are two frames in a row more than a day apart? FLV's times before 0 come back as 24 days and more."""
    return bool(len(times) > 1 and np.diff(times).max() * video.stream.time_base > _DAY)


def _rows(video: Opened, limits: Limits) -> list[tuple[int | None, int | None, int, bool, bool]]:
    """Per packet: pts, dts (else pts), duration, is it a keyframe, is it shown."""
    rows = []
    for packet in _demuxed(video):
        if not packet.size:  # the end
            continue
        order = packet.pts if packet.dts is None else packet.dts
        rows.append(
            (packet.pts, order, packet.duration or 0, packet.is_keyframe, not packet.is_discard)
        )
        if packet.is_corrupt:
            raise _cut(video, len(rows))
        if len(rows) > limits.max_frames:
            raise VideoError(
                f"{video.where} has more than {limits.max_frames} frames. "
                "Fix: pass a shorter clip, or Limits(max_frames=…)"
            )
    if not any(shown for *_, shown in rows):
        raise VideoError(
            f"{video.where}: its video stream holds no frame. Fix: pass a file with at least one frame"
        )
    if "mp4" in video.container.format.name and len(rows) < len(video.stream.index_entries):
        raise _cut(video, len(rows))
    return rows


def _demuxed(video: Opened) -> Iterator[Any]:
    """The packets as PyAV has them, which knows the streams that a file begins with only."""
    try:
        yield from video.container.demux(video.stream)
    except IndexError:
        raise VideoError(
            f"{video.where}: one of its streams begins midway. Fix: remux its video, e.g. ffmpeg -map 0:v -c copy"
        ) from None


def _cut(video: Opened, count: int) -> VideoError:
    return VideoError(
        f"{video.where}: packet {count} of its video stream is cut or broken. Fix: pass the whole file"
    )
