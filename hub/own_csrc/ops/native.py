"""The ops of csrc/ that this build was compiled with."""

from typing import Any

from .._ops import ops


def native_ops() -> Any:
    """The library's ops."""
    return ops


def why_not() -> None:
    """None: `kernels` loads a build only where it fits torch, CUDA and the GPU."""
