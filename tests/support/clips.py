"""Clips for the tests of patch packing, and their rows by numpy."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from mmpack.families import get_family
from mmpack.video.patches import PatchPlan

# frames, height, width in merged patches: whole, odd, one frame, one token
SIZES = [(4, 2, 3), (5, 1, 2), (1, 3, 1), (2, 1, 1), (3, 2, 2)]
PIXELS = {
    "rescale_factor": 1 / 255,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


def shapes_of(name: str, last: bool, sizes=SIZES) -> list[tuple[int, ...]]:
    family = get_family(name)
    unit = family.patch_size * family.spatial_merge_size
    sides = [(n, h * unit, w * unit) for n, h, w in sizes]
    return [(n, h, w, 3) if last else (n, 3, h, w) for n, h, w in sides]


def clips_of(shapes, seed: int = 0, device: str | torch.device = "cpu") -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 256, s, dtype=np.uint8)).to(device) for s in shapes]


def rows_by_index(clips: list[torch.Tensor], plan: PatchPlan) -> torch.Tensor:
    """Rows by the plan's index, clip after clip; gradients by torch's own indexing."""
    index = [torch.from_numpy(plan.gather_index(i)) for i in range(len(clips))]
    rows = [c.reshape(-1)[i.to(c.device)] for c, i in zip(clips, index, strict=True)]
    return torch.cat(rows)


def normalised(rows: torch.Tensor, rescale_factor=None, mean=None, std=None) -> torch.Tensor:
    """What torchvision's `normalize` and transformers' fused factors make of rows; float32."""
    values = rows.to(torch.float32).view(len(rows), 3, -1)
    if mean is None:
        return (values * rescale_factor).view_as(rows)
    factor = 1.0 if rescale_factor is None else 1.0 / rescale_factor
    mean, std = ((torch.tensor(x, device=rows.device) * factor)[:, None] for x in (mean, std))
    return ((values - mean) / std).view_as(rows)


def frames_of(count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3]: every value depends on its place, and all 256 occur."""
    t, y, x, c = np.ogrid[:count, :height, :width, :3]
    return ((t * 89 + y * 31 + x * 7 + c * 113 + x * y // 5) % 256).astype(np.uint8)


def digest(values: torch.Tensor) -> str:
    """sha256 hex over dtype, shape and bytes."""
    array = np.ascontiguousarray(values.cpu().numpy())
    head = f"{array.dtype} {list(array.shape)}\0".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()
