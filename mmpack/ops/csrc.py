"""Columns as the ops of csrc/ read them: contiguous, and of a dtype that they know.

Each op's binding is `cuda.py` in the op's home; the numbers that its names become there are those of csrc/ops.h.
"""

from __future__ import annotations

from mmpack.errors import needs

with needs("torch", "mmpack.ops"):
    import torch
    from torch import Tensor

READ = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64}


def column(tensor: Tensor | None) -> Tensor | None:
    """Contiguous, of a dtype in `READ`; float64 where it was of another."""
    if tensor is None or (tensor.dtype in READ and tensor.is_contiguous()):
        return tensor
    return (tensor if tensor.dtype in READ else numbers(tensor)).contiguous()


def numbers(tensor: Tensor) -> Tensor:
    """Contiguous float32 or float64."""
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        return tensor
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float32 if narrow else torch.float64).contiguous()


def index(tensor: Tensor) -> Tensor:
    """Contiguous int32 or int64."""
    if tensor.dtype in (torch.int32, torch.int64) and tensor.is_contiguous():
        return tensor
    return (tensor if tensor.dtype == torch.int32 else tensor.to(torch.int64)).contiguous()
