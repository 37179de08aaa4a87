"""The transformers model in what frameworks hand around: wrappers of PEFT, DDP, DeepSpeed; others are refused by name.

FSDP2's `fully_shard`, tensor parallel and ZeRO-3 leave the model as it is, with parameters that are whole, or together,
only in its forward.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from mmpack.errors import MmpackWarning, ModelError

_looked_for = weakref.WeakSet[torch.nn.Module]()  # models whose wrapper was looked for


def unwrap(model: Any, what: str) -> Any:
    """The whole model, with its head; of a PEFT model the one that its adapters live in.

    Raises: ModelError for anything else, and for PEFT methods that put tokens of their own before the batch's.
    """
    if is_parallel(model):
        model = model.module
    if isinstance(model, PreTrainedModel):
        return model
    peft = getattr(model, "active_peft_config", None)
    if peft is None:
        raise ModelError(
            f"{what}: {type(model).__name__} is not a transformers model. Fix: pass the model that from_pretrained "
            "made, or PEFT's, DistributedDataParallel's or FSDP2's (fully_shard) of it; compile its layers, not it"
        )
    if getattr(peft, "is_prompt_learning", False):
        raise ModelError(
            f"{what}: {type(peft).__name__} adds its own tokens, and packed rows have no room for them. "
            "Fix: train adapters of weights (LoRA)"
        )
    return model.get_base_model()


def is_parallel(model: Any) -> bool:
    """Whether it is DDP, or DeepSpeed's engine, around a model: it reduces only the gradients of its own forward."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel) or is_engine(model)


def warn_of_wrapper(model: Any, whole: Any, what: str) -> None:
    """Warn, as `what`, that DDP or DeepSpeed wraps a model that was passed without its wrapper, and reduces nothing.

    Once per model: at its first pass with gradients all objects of the process are looked through.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1 or not torch.is_grad_enabled():
        return
    if is_parallel(model) or whole in _looked_for:
        return
    _looked_for.add(whole)
    for held in gc.get_objects():
        if (
            issubclass(type(held), torch.nn.Module)
            and is_parallel(held)
            and _is_around(held, whole)
        ):
            warnings.warn(
                f"{what}: the model is in {type(held).__name__}, but what was passed is its .module: gradients are not "
                "reduced, and ranks drift apart. Fix: pass the wrapper",
                MmpackWarning,
                stacklevel=4,
            )
            return


def _is_around(parallel: Any, whole: Any) -> bool:
    """Whether it wraps the model, or PEFT's wrapper of it; not a module whose own forward calls the model."""
    inside = parallel.module
    if getattr(inside, "active_peft_config", None) is not None:
        inside = inside.get_base_model()
    return inside is whole


def is_engine(model: Any) -> bool:
    """Whether it is DeepSpeed's engine, whose module is the model."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ranks share parameters of the module (FSDP2, tensor parallel, ZeRO-3).

    It runs only within the whole model's forward then.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    # ZeRO-3 keeps this rank's part in an attribute
    return any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in module.parameters())
