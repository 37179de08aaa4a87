"""The transformers model in what frameworks hand around: PEFT's wrapper holds it; others are refused by name.

FSDP2's `fully_shard` leaves the model as it is, with parameters that are whole in its forward alone.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from mmpack.errors import ModelError


def unwrap(model: Any, what: str) -> Any:
    """The whole model, with its head; of a PEFT model the one that its adapters live in.

    Raises: ModelError for anything else, and for PEFT methods that put tokens of their own before the batch's.
    """
    if isinstance(model, PreTrainedModel):
        return model
    peft = getattr(model, "active_peft_config", None)
    if peft is None:
        inner = " Fix: pass its .module" if hasattr(model, "module") else " Fix: pass the model"
        raise ModelError(
            f"{what}: {type(model).__name__} is no transformers model.{inner} that from_pretrained made"
        )
    if getattr(peft, "is_prompt_learning", False):
        raise ModelError(
            f"{what}: {type(peft).__name__} adds tokens of its own, which packed rows have no place for. "
            "Fix: train adapters of weights (LoRA)"
        )
    return model.get_base_model()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP2 spreads parameters of the module over ranks: it runs inside the whole model's forward alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in module.parameters())
