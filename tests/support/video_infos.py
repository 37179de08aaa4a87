"""VideoInfos without a file."""

from __future__ import annotations

import numpy as np

from mmpack.video.info import VideoInfo


def clip(
    total: int,
    fps: float | None = 25.0,
    width: int = 640,
    height: int = 360,
    timestamps: np.ndarray | None = None,
    rotation: int = 0,
) -> VideoInfo:
    """A clip of constant rate, or with the times given; `width` and `height` are upright."""
    times = np.arange(total) / (fps or 25.0) if timestamps is None else np.asarray(timestamps)
    return VideoInfo(
        width=width,
        height=height,
        rotation=rotation,
        codec="h264",
        fps=fps,
        total_frames=total,
        timestamps=times,
        variable=timestamps is not None,
        duration=total / (fps or 25.0),
        content_key="0" * 64,
    )
