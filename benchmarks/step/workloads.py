"""The samples of the step's benchmark: drawn by seed, so that every peer and every run has the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.families import Family, get_family
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

_IDS = 150_000  # below the special ones


@dataclass(frozen=True)
class Workload:
    """Prompts with media, and responses to each. Sizes in tokens, sides in pixels."""

    about: str
    prompt: int
    responses: int  # of a prompt
    shortest: int
    longest: int
    side: int
    media: int = 1  # of a prompt
    frames: int = 0  # of each medium; 0: a picture
    prompts: int = 4


# As many prompts as let the padded peer of a 7B model run in 80 GB.
WORKLOADS = {
    "geo": Workload("one 896 × 896 picture", 1200, 8, 300, 1500, 896),
    "pictures": Workload("four 448 × 448 pictures", 1200, 8, 300, 1500, 448, media=4),
    "video": Workload("64 frames of 224 × 224", 2400, 8, 300, 1500, 224, frames=64),
    "long": Workload("short prompt, long response", 300, 4, 4000, 4000, 224),
}


def tiny(workload: Workload) -> Workload:
    """The same in a size for a CPU: media of 12 × 12 patches, which are more than one window."""
    return replace(
        workload,
        prompt=200,
        responses=3,
        shortest=8 if workload.longest < 4000 else 40,
        longest=24 if workload.longest < 4000 else 40,
        side=0,
        frames=min(workload.frames, 6),
        prompts=2,
    )


def draw(workload: Workload, family_name: str, dtype: Any) -> tuple[list[Sample], np.ndarray]:
    """Samples with pixels of `dtype` (torch's), group after group, and their advantages, float64 [B]."""
    import torch

    family = get_family(family_name)
    side = workload.side // family.patch_size or 12
    grid = (max(1, workload.frames // family.temporal_patch_size), side, side)
    rng = np.random.default_rng(1)
    samples, advantages = [], []
    for g in range(workload.prompts):
        media = []
        for k in range(workload.media):
            size = (int(np.prod(grid)), family.patch_dim)
            pixels = torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).to(dtype)
            media.append(_medium(f"m{g}.{k}", workload, family, grid, pixels))
        head = rng.integers(0, _IDS, 30)
        placed, spans = _placed(media, family, len(head), rng)
        tail = rng.integers(0, _IDS, workload.prompt - len(head) - len(placed))
        prompt = np.concatenate([head, placed, tail])
        for j in range(workload.responses):
            length = int(rng.integers(workload.shortest, workload.longest + 1))
            ids = np.concatenate([prompt, rng.integers(0, _IDS, length)]).astype(np.int64)
            samples.append(
                Sample(
                    sample_id=f"{g}.{j}",
                    group_id=str(g),
                    family=family.name,
                    input_ids=ids,
                    media=media,
                    modality_spans=spans,
                    loss_spans=[LossSpan(len(prompt), len(ids))],
                )
            )
            advantages.append(rng.standard_normal())
    return samples, np.asarray(advantages)


def _medium(
    name: str, workload: Workload, family: Family, grid: tuple[int, int, int], pixels: Any
) -> Medium:
    key = hashlib.sha256(name.encode()).hexdigest()
    video = workload.frames > 0
    return Medium(
        media_id=name,
        modality="video" if video else "image",
        cache_key=key,
        content_hash=key,
        grid_thw=grid,
        num_tokens=family.vision_tokens(grid),
        size=(grid[2] * family.patch_size, grid[1] * family.patch_size),
        second_per_grid_ts=1.0 if video else None,
        pixel_values=pixels,
    )


def _placed(
    media: list[Medium], family: Family, start: int, rng: np.random.Generator
) -> tuple[np.ndarray, list[ModalitySpan]]:
    """The media's ids, each run between its markers (a frame of Qwen3-VL after its time), and their spans."""
    ids: list[int] = []
    spans = []
    for index, medium in enumerate(media):
        runs = family.spans_of(medium.modality, medium.grid_thw)
        length = medium.num_tokens // runs
        for run in range(runs):
            if runs > 1:
                ids += rng.integers(0, _IDS, 6).tolist()  # "<3.5 seconds>"
            ids += family.starts
            at = start + len(ids)
            frame = run if runs > 1 else None
            spans.append(ModalitySpan(at, at + length, medium.modality, index, frame))
            ids += [family.placeholder_ids[medium.modality]] * length + family.ends
    return np.asarray(ids, dtype=np.int64), spans
