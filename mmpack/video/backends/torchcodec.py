"""Decoding by torchcodec, with the FFmpeg libraries that it finds: the reference's pixels, uint8 RGB [n, h, w, 3]."""

from __future__ import annotations

import json
import os

import numpy as np

from mmpack.errors import BackendError, require
from mmpack.video.backends.exact import FIX, why_not
from mmpack.video.files.container import IN_MEMORY, Opened, Source
from mmpack.video.files.packets import Packets


def refusal(video: Opened, packets: Packets) -> str | None:
    """Why this stream can't be decoded exactly here, or None."""
    return why_not("torchcodec", video, packets)


def decode(
    source: Source, video: Opened, packets: Packets, frames: np.ndarray, threads: int
) -> np.ndarray:
    """uint8 [len(frames), h, w, 3], upright. `frames`: distinct and ascending. Raises: BackendError."""
    decoders = require("torchcodec.decoders", "torchcodec", video.where)
    try:
        decoder = decoders.VideoDecoder(
            bytes(source) if isinstance(source, IN_MEMORY) else os.fspath(source),
            stream_index=video.stream.index,
            dimension_order="NHWC",
            num_ffmpeg_threads=threads,
            device="cpu",
            custom_frame_mappings=_mappings(packets),
        )
        batch = decoder.get_frames_at(frames.tolist())
    except (RuntimeError, IndexError, ValueError) as error:
        why = " ".join(str(error).split())[-200:]
        raise BackendError(f"{video.where}: torchcodec can't decode it ({why}). {FIX}") from None
    pixels: np.ndarray = batch.data.numpy()
    return pixels


def _mappings(packets: Packets) -> str:
    """What is known of the packets, so that it isn't read once more."""
    assert packets.pts is not None
    rows = zip(
        packets.pts.tolist(), packets.durations.tolist(), packets.keyframes.tolist(), strict=True
    )
    return json.dumps(
        {"frames": [{"pts": p, "duration": d, "key_frame": int(k)} for p, d, k in rows]}
    )
