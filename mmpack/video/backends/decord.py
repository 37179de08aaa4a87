"""Decoding by decord 0.6, which is exact on H.264: the reference's pixels, uint8 RGB [n, h, w, 3]."""

from __future__ import annotations

import io
import os

import numpy as np

from mmpack.errors import BackendError, require
from mmpack.video.backends.exact import FIX, why_not
from mmpack.video.files.container import IN_MEMORY, Opened, Source
from mmpack.video.files.packets import Packets


def refusal(video: Opened, packets: Packets) -> str | None:
    """Why this stream can't be decoded exactly here, or None."""
    codec = video.stream.codec_context.codec.canonical_name
    if codec != "h264":
        return f"is exact on h264, and this is {codec}"
    if len(video.container.streams.video) > 1:
        return "takes another of several video streams"
    return why_not("decord", video, packets)


def decode(
    source: Source, video: Opened, packets: Packets, frames: np.ndarray, threads: int
) -> np.ndarray:
    """uint8 [len(frames), h, w, 3], upright. `frames`: distinct and ascending. Raises: BackendError."""
    decord = require("decord", "decord", video.where)
    try:
        reader = decord.VideoReader(
            io.BytesIO(source) if isinstance(source, IN_MEMORY) else os.fspath(source),
            num_threads=threads,
        )
        counted = len(reader)
        pixels: np.ndarray = reader.get_batch(frames.tolist()).asnumpy()
    except (decord.DECORDError, RuntimeError, IndexError) as error:
        why = str(error).strip().splitlines()[0][-200:]
        raise BackendError(f"{video.where}: decord can't decode it ({why}). {FIX}") from None
    if counted != len(packets.frames):
        raise BackendError(
            f"{video.where}: decord counts {counted} frames, but the file has {len(packets.frames)}. {FIX}"
        )
    return pixels
