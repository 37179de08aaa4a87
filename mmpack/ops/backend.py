"""Which implementation of an op runs: chosen by device, by what is installed and by MMPACK_BACKEND, never by trying.

`torch` runs on anything, `triton` on CUDA and ROCm devices (on the CPU under TRITON_INTERPRET=1), `cuda` (csrc/) on
CUDA devices. `auto` takes the first of an op's row in KERNELS that can run, else torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from mmpack.errors import BackendError

BACKENDS = ("torch", "triton", "cuda")

# Kernels of each op besides the torch path, the fastest first.
KERNELS: dict[str, tuple[str, ...]] = {
    "selected_logprobs": ("triton",),
    "linear_selected_logprobs": ("triton",),
}


def choose(op: str, device: torch.device) -> str:
    """The backend that `op` runs on for tensors of `device`.

    Raises BackendError where MMPACK_BACKEND names one that is unknown or that can't run this op here.
    """
    wanted = os.environ.get("MMPACK_BACKEND") or "auto"
    if wanted == "auto":
        if device.type == "cpu":
            return "torch"
        return next((b for b in KERNELS[op] if why_not(op, b, device) is None), "torch")
    if wanted not in BACKENDS:
        raise BackendError(f"MMPACK_BACKEND is {wanted!r}. Fix: one of auto, {', '.join(BACKENDS)}")
    reason = why_not(op, wanted, device)
    if reason is not None:
        raise BackendError(
            f"{op}: MMPACK_BACKEND is {wanted}, and {reason}. Fix: MMPACK_BACKEND=auto"
        )
    return wanted


def why_not(op: str, backend: str, device: torch.device) -> str | None:
    """Why `backend` can't run `op` on `device`; None where it can."""
    if backend == "torch":
        return None
    if backend not in KERNELS[op]:
        return f"the op has no {backend} kernel"
    return _why_no_triton(device.type)


def _why_no_triton(device_type: str) -> str | None:
    if not _installed("triton"):
        return "triton is not installed (pip install 'mmpack[triton]')"
    if device_type == "cpu":
        # As triton itself reads it, when its kernels are defined.
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "triton runs on the CPU under TRITON_INTERPRET=1 alone"
    return None if device_type == "cuda" else f"triton has no {device_type} device"


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
