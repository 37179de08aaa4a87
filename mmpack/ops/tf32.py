"""Torch's settings of float32 products, by whichever of its names they were set."""

from __future__ import annotations

from typing import Any

import torch


def allows_tf32() -> bool:
    """Whether float32 products on CUDA devices may be TF32."""
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # set by a newer name, which torch lets nobody mix with this one
        return str(matmul.fp32_precision) == "tf32"


def allows_tf32_convolutions() -> bool:
    """The same of cuDNN's convolutions."""
    cudnn: Any = torch.backends.cudnn
    try:
        return bool(cudnn.allow_tf32)
    except RuntimeError:
        return str(cudnn.conv.fp32_precision) == "tf32"


def float32_products() -> str:
    """How float32 products are made on CUDA devices and on the CPU: equal texts for equal settings."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends
        return f"{backends.cuda.matmul.fp32_precision}, {backends.mkldnn.matmul.fp32_precision}"
