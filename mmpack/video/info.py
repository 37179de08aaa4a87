"""`probe`: size, rate and the time of each frame of a video file. Times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mmpack.video.backends.pyav import first_picture
from mmpack.video.files.container import Source, content_key, opened, rotation_of
from mmpack.video.files.packets import Packets, read_packets
from mmpack.video.files.readers import Reading, read_all
from mmpack.video.limits import Limits

ROUNDED = 1e-3  # seconds: times that went through a file that counts milliseconds
COARSE_TICKS = 4  # a clock with so few ticks per frame counts frames, and rounds nothing


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """One video stream. Frames are counted in presentation order, from 0."""

    width: int  # upright, after rotation
    height: int
    rotation: int  # 0, 90, 180 or 270: degrees clockwise that turn the stored picture upright
    codec: str  # FFmpeg's name: h264, hevc, vp9, av1, …
    fps: float | None  # average, as the container has it or its times give it
    total_frames: int  # in the stream; the header may count others
    # float64 [total_frames] from the first frame; None: the packets have no times
    timestamps: np.ndarray | None
    variable: bool  # the time between frames varies
    duration: float  # from the first frame to the end of the last
    content_key: str  # sha256 hex of the file's bytes
    # reader: its own fps, frame count and duration; empty where no file was read
    readings: Mapping[str, Reading] = field(default_factory=dict)
    held_frames: int | None = None  # of `as_read`: frames that can be decoded; None: `total_frames`

    def as_read(self, reader: str, *, checks_end: bool = False) -> VideoInfo:
        """`fps`, `total_frames` and `duration` as `reader` has them.

        `checks_end`: a count that goes beyond the end is corrected, as vLLM does.
        """
        reading = self.readings.get(reader)
        if reading is None:
            return self
        total, duration = reading.counted(checks_end)
        return replace(
            self,
            fps=reading.fps,
            total_frames=total,
            duration=duration,
            held_frames=self.total_frames,
        )


def probe(source: Source, *, limits: Limits | None = None) -> VideoInfo:
    """Read all packets of `source` (a file's bytes, or its path); only its first picture is decoded, for the rotation.

    Raises: ArgumentError (a path that can't be read), VideoError (no video, cut, empty, broken, over `limits`),
    MissingExtraError without PyAV.
    """
    limits = limits or Limits()
    with opened(source, limits) as video:
        packets = read_packets(video, limits)
        picture = first_picture(video, packets)
        rotation = rotation_of(picture, video.where)
        readings = read_all(source, video, packets, picture)
        codec = video.stream.codec_context.codec.canonical_name
    upright = (picture.width, picture.height)[:: -1 if rotation in (90, 270) else 1]
    container = readings["container"]
    return VideoInfo(
        width=upright[0],
        height=upright[1],
        rotation=rotation,
        codec=codec,
        fps=container.fps,
        total_frames=container.total_frames,
        timestamps=packets.timestamps,
        variable=_is_variable(packets),
        duration=container.duration,
        content_key=content_key(source),
        readings=readings,
    )


def _is_variable(packets: Packets) -> bool:
    """Steps that differ by more than rounding: to milliseconds, or to ticks where a frame has several."""
    if packets.pts is None or len(packets.frames) < 3:
        return False
    steps = np.diff(packets.pts[packets.frames])
    tick = float(packets.time_base)
    rounding = max(ROUNDED, tick if np.median(steps) > COARSE_TICKS else 0.0)
    return float(np.ptp(steps)) * tick > 1.01 * rounding
