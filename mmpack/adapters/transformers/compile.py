"""torch.compile of a VLM's layers, one by one: norms, rotary, activations and residuals become a few kernels a layer.

Layers of one kind share a graph; packs of other lengths run on the same one.
"""

from __future__ import annotations

from typing import Any

import torch

from mmpack.adapters.transformers.unwrap import unwrap


def compile_layers(model: Any, *, tower: bool = True, **options: Any) -> None:
    """Compile each decoder layer of a transformers VLM and, with `tower`, each block of its vision tower.

    Args: `options`: of torch.compile.
    """
    whole = unwrap(model, "compile_layers")
    for layer in layers_of(whole, tower):
        layer.compile(**{"dynamic": True} | options)


def layers_of(whole: Any, tower: bool) -> list[torch.nn.Module]:
    """The decoder's layers, and the tower's blocks."""
    found = list(whole.get_decoder().layers)
    if tower:
        found += tower_blocks(whole)
    return found


def tower_blocks(whole: Any) -> list[torch.nn.Module]:
    """The blocks of the vision tower, in order."""
    core = whole.model
    visual = core.visual if hasattr(core, "visual") else core.vision_tower.encoder
    blocks = visual.blocks if hasattr(visual, "blocks") else visual.layer
    return list(blocks)
