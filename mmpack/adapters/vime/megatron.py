"""What the adapter asks Megatron: this rank's place in the tensor-parallel and context-parallel groups."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from mmpack.errors import ModelError

FRAMEWORKS = ("vime", "slime")


class Ranks(NamedTuple):
    """Groups as Megatron hands them out; those of one rank are not used."""

    tp_group: Any
    tp_size: int
    cp_group: Any
    cp_rank: int
    cp_size: int


def ranks() -> Ranks:
    """Ranks of this process. Raises: ModelError without Megatron."""
    try:
        mpu = importlib.import_module("megatron.core").mpu
    except ImportError:
        raise ModelError(
            "vime: Megatron, which knows the ranks, is not installed. Fix: run in vime's or slime's trainer"
        ) from None
    tp_group = mpu.get_tensor_model_parallel_group()
    cp_size = mpu.get_context_parallel_world_size()
    return Ranks(
        tp_group,
        size_of(tp_group),
        mpu.get_context_parallel_group() if cp_size > 1 else None,
        mpu.get_context_parallel_rank(),
        cp_size,
    )


def size_of(group: Any) -> int:
    """Ranks of a group; 1 for none, and where no group was made."""
    if group is None or not dist.is_initialized():
        return 1
    return int(dist.get_world_size(group))


def backends() -> list[ModuleType]:
    """The Megatron backend's module `loss` of each framework that is imported, vime's before slime's."""
    names = [f"{name}.backends.megatron_utils.loss" for name in FRAMEWORKS]
    return [sys.modules[name] for name in names if name in sys.modules]
