"""What a video may cost in memory and time before it is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Checked against the headers before anything of that size is allocated, and again by the decoder."""

    max_pixels: int = 8192 * 8192  # of one frame
    max_frames: int = 1 << 20  # of the stream: 9.7 hours at 30 frames per second
    # decoded on the way to the frames asked for: 73 minutes of 1080p30
    max_decoded_pixels: int = 1 << 38
    max_bytes: int = 8 << 30  # of the frames handed out
