"""A checkpoint by name or path: its model in fp32 on the CPU, and its processor, with or without torchvision."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from mmpack.adapters import qwen_processor
from mmpack.errors import ArgumentError
from mmpack.families import family_of_model_type

_PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}


def load_checkpoint(name: str) -> tuple[Any, Any]:
    """(model in eval mode, processor). Raises: ArgumentError if it can't be had; LayoutError for other families."""
    try:
        config = AutoConfig.from_pretrained(name)
        family = family_of_model_type(config.model_type)
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32)
        processor = getattr(qwen_processor, _PROCESSORS[family.name]).from_pretrained(name)
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError) or type(error).__module__.startswith("mmpack"):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(
            f"--model: {name!r} can't be loaded ({reason}). Fix: a folder with a checkpoint, or a hub name"
        ) from None
    return model.eval(), processor
