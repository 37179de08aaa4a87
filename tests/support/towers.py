"""Media for vision towers alone: sizes that windows divide and don't, videos, tiles; features and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from support.models import Gradients

from mmpack.adapters.transformers.tower_attention import tower_of
from mmpack.families import get_family

GRIDS = {  # (t, h, w) of media; a window is 8 × 8 patches
    "one picture": [(1, 16, 16)],
    "pictures that windows don't divide": [(1, 12, 10), (1, 18, 8), (1, 8, 20)],
    "a tiny one and a large one": [(1, 2, 2), (1, 26, 24), (1, 2, 2)],
    "videos": [(3, 10, 8), (1, 4, 4), (2, 8, 8)],
}
CASES = [
    (family, grids)
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    for grids in ("pictures that windows don't divide", "a tiny one and a large one", "videos")
] + [("internvl", "tiles")]


def media_of(family: str, grids: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Keywords of get_image_features or get_video_features, and which of them it is."""
    torch.manual_seed(0)
    if family == "internvl":
        return "image", {"pixel_values": torch.randn(5, 3, 56, 56)}
    sizes = GRIDS[grids]
    pixels = torch.randn(sum(t * h * w for t, h, w in sizes), get_family(family).patch_dim)
    if any(t > 1 for t, _, _ in sizes):
        return "video", {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(sizes)}
    return "image", {"pixel_values": pixels, "image_grid_thw": torch.tensor(sizes)}


def encode(
    model: Any, modality: str, media: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], Gradients]:
    """Features of all levels, and the gradients of pixels and of the tower's parameters."""
    pixels = media[next(iter(media))].detach().to(model.dtype).requires_grad_()
    media = media | {next(iter(media)): pixels}
    make = model.model.get_image_features if modality == "image" else model.model.get_video_features
    tower = tower_of(model.model)
    out = make(**media, return_dict=True)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    levels = [x if torch.is_tensor(x) else torch.cat(tuple(x)) for x in levels]
    torch.manual_seed(1)
    weights = [torch.randn(x.shape).to(x) for x in levels]
    loss = sum((x * w).sum() for x, w in zip(levels, weights, strict=True))
    parameters = dict(tower.named_parameters())
    found = torch.autograd.grad(loss, [pixels, *parameters.values()], allow_unused=True)
    gradients = dict(zip(["pixels", *parameters], found, strict=True))
    return levels, {n: g for n, g in gradients.items() if g is not None}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Frobenius norm of the difference, over that of the second."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
