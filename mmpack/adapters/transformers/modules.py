"""Where a transformers VLM of any family has its parts. `core`: the model below its head; `whole`: with it."""

from __future__ import annotations

from typing import Any

import torch


def tower_of(core: Any) -> torch.nn.Module:
    """The vision tower."""
    tower: torch.nn.Module = core.get_encoder(modality="image")
    return tower


def audio_tower_of(core: Any) -> torch.nn.Module:
    """The audio tower of a model that hears; else the core itself."""
    tower: torch.nn.Module = core.get_encoder(modality="audio")
    return tower


def beside_text(core: Any) -> list[torch.nn.Module]:
    """The modules beside the text model, which may be all there is."""
    decoder = core.get_decoder()
    return [] if decoder is core else [m for m in core.children() if m is not decoder]


def decoder_layers(whole: Any) -> list[torch.nn.Module]:
    """The text model's layers, in order."""
    return list(whole.get_decoder().layers)


def tower_blocks(whole: Any) -> list[torch.nn.Module]:
    """The vision tower's blocks, in order."""
    tower: Any = tower_of(whole.model)
    tower = getattr(tower, "vision_model", tower)
    held = getattr(tower, "encoder", getattr(tower, "transformer", tower))
    names = ("blocks", "layers", "layer")
    return list(next(getattr(held, name) for name in names if hasattr(held, name)))


def attention_configs(*modules: torch.nn.Module) -> list[Any]:
    """The configs that attention layers in these modules read, each once; one, as a rule."""
    found = {
        id(c): c
        for module in modules
        for m in module.modules()
        if hasattr(c := getattr(m, "config", None), "_attn_implementation")
    }
    return list(found.values())
