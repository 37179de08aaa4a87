"""A clip whose frames tell their number, made with PyAV, and traces of what a policy takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
from support.samples import make_sample

import mmpack as mp
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.video import FramePlan, decode, probe, sample
from mmpack.video.info import VideoInfo

FPS, FRAMES, WIDTH, HEIGHT = 25, 138, 160, 120
SMALL = {"min_pixels": 4 * 28 * 28, "max_pixels": 6 * 28 * 28}


def write_clip(path: Path, frames: int = FRAMES, brightness: int = 0) -> Path:
    """H.264 without loss; frame k holds k as eight columns of black and white."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for k in range(frames):
            picture = av.VideoFrame.from_ndarray(drawn(k, brightness), "rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def drawn(k: int, brightness: int = 0) -> np.ndarray:
    bits = np.array([k >> b & 1 for b in range(8)], np.uint8).repeat(WIDTH // 8)
    row = 16 + brightness + 200 * bits
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).astype(np.uint8)


def number_of(picture: np.ndarray) -> int:
    """The k of a picture, of any size."""
    h, w = picture.shape[:2]
    columns = ((np.arange(8) + 0.5) * w / 8).astype(int)
    return sum(int(picture[h // 2, x].mean() > 120) << b for b, x in enumerate(columns))


def watched(
    path: Path,
    policy: str = "qwen_vl_utils",
    sample_id: str = "video",
    info: VideoInfo | None = None,
    **settings: Any,
) -> tuple[mp.Sample, FramePlan, np.ndarray]:
    """A sample of a question about the clip at `path`, its plan, and the frames."""
    info = info or probe(path)
    plan = sample(info, policy=policy, **({"fps": 2.0} | SMALL | settings))
    frames = decode(path, plan)
    made = make_sample(
        [
            ("text", [1, 2]),
            ("video", plan.grid_thw, path.stem),
            ("text", [3]),
            ("response", [7, 8]),
        ],
        sample_id=sample_id,
        processor={"video": {"sampling": plan.processor_settings()}},
    )
    (medium,) = made.media
    for name, value in plan.medium_fields().items():
        setattr(medium, name, value)
    medium.source, medium.file_hash = path.name, info.content_key
    medium.content_hash = content_hash("video", frames)
    medium.cache_key = cache_key(medium.content_hash, plan.grid_thw, made.processor["video"])
    return made, plan, frames
