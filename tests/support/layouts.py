"""Random layouts of a family: ids with their grids, for comparisons of positions."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family

Grid = list[int]


def random_layout(
    rng: np.random.Generator, family: Family, videos: bool = True, image_frames: int = 2
) -> tuple[np.ndarray, list[Grid], list[Grid], list[float]]:
    """ids, image grids, video grids, seconds: text, media and text again, media always fenced."""
    ids: list[int] = []
    images: list[Grid] = []
    video_grids: list[Grid] = []
    seconds: list[float] = []
    videos = videos and family.video_token_id is not None
    for _ in range(rng.integers(0, 6)):
        ids += _text(rng, 0)
        is_video = videos and rng.random() < 0.4
        t = int(rng.integers(1, 7 if is_video else 1 + image_frames))
        h, w = (2 * int(n) for n in rng.integers(1, 9, 2))
        kind = "video" if is_video else "image"
        runs = family.spans_of(kind, (t, h, w))
        begin, end = ([i] for i in family.video_bounds) if family.video_bounds else ([], [])
        ids += begin if is_video else []
        for _ in range(runs):
            run = [family.placeholder_ids[kind]] * (t * h * w // 4 // runs)
            text = _text(rng, 1) if is_video and family.video_layout == "frames" else []
            ids += [*text, family.vision_start_id, *run, family.vision_end_id]
        ids += end if is_video else []
        if is_video:
            video_grids.append([t, h, w])
            seconds.append(float(rng.choice([0.5, 1.0, 0.48, 0.08, 0.3333, 2.7, 1 / 3, 1 / 24])))
        else:
            images.append([t, h, w])
    return np.array(ids + _text(rng, 1)), images, video_grids, seconds


def _text(rng: np.random.Generator, least: int) -> list[int]:
    return [int(i) for i in rng.integers(0, 1000, rng.integers(least, 9))]
