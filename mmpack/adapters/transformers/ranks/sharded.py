"""A tower that FSDP2 shards, run by itself: within the forward of the module that gathers its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmpack.adapters.transformers.heads import forward_of
from mmpack.cache.tower import Tower


def in_forward(model: Any, tower: Tower, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `run` returns, by the forward of the outermost FSDP2 module around the tower; without one, as it is.

    FSDP2 gathers weights before that module's forward, and before the backward of what it returns.
    """
    root = _root(model, tower)
    if root is None:
        return run()
    dtypes: list[torch.dtype] = []

    def forward(_: None) -> list[Tensor]:
        made = run()
        dtypes.extend(x.dtype for x in made)
        return [_uncast(x) for x in made]

    with forward_of(root, forward):
        out = root(None)  # without an argument, FSDP2 of torch 2.11 raises on a GPU
    return [_as_before(x, dtype) for x, dtype in zip(out, dtypes, strict=True)]


def _root(model: Any, tower: Tower) -> Any:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        inside: Any = module
        if isinstance(module, FSDPModule) and any(tower.modules[0] is m for m in inside.modules()):
            return module
    return None


def _uncast(x: Tensor) -> Tensor:
    """A policy's output_dtype casts real numbers: float32 [tokens, H] passes as complex ones, if H is even. No view."""
    if x.dtype != torch.float32 or x.shape[-1] % 2:
        return x.clone()
    return torch.complex(x[..., ::2], x[..., 1::2])


def _as_before(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x.to(dtype)
