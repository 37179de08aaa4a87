"""Which implementation of an op runs: chosen by device, by what is installed and by MMPACK_BACKEND, never by trying.

`torch` runs on anything, `triton` on CUDA and ROCm devices (on the CPU under TRITON_INTERPRET=1), `cuda` (csrc/) on
CUDA devices. `auto` takes the first of an op's row in KERNELS that can run, else torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch

from mmpack.errors import BackendError

BACKENDS = ("torch", "triton", "cuda")

# Kernels of each op besides the torch path, in the order in which auto takes them.
KERNELS: dict[str, tuple[str, ...]] = {
    "gather_rows": ("cuda", "triton"),
    "sum_rows": ("triton",),
    "merge_embeddings": ("triton",),
    "selected_logprobs": ("triton",),
    "linear_selected_logprobs": ("triton",),
    "policy_loss": ("cuda", "triton"),
    "group_advantages": ("cuda", "triton"),
    "scatter_rewards": ("cuda", "triton"),
    "pack_video": ("cuda", "triton"),
    "unpack_video": ("cuda", "triton"),
}

PACKS = ("pack_video", "unpack_video")
HALVES = (torch.bfloat16, torch.float16)


def choose(op: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """The backend that `op` runs on for tensors of `device`, and of `dtype` where an op has kernels for some alone.

    Raises BackendError where MMPACK_BACKEND names one that is unknown or that can't run this op here.
    """
    wanted = os.environ.get("MMPACK_BACKEND") or "auto"
    if wanted == "auto":
        if device.type == "cpu":
            return "torch"
        return next((b for b in KERNELS[op] if why_not(op, b, device, dtype) is None), "torch")
    if wanted not in BACKENDS:
        raise BackendError(f"MMPACK_BACKEND is {wanted!r}. Fix: one of auto, {', '.join(BACKENDS)}")
    reason = why_not(op, wanted, device, dtype)
    if reason is not None:
        raise BackendError(
            f"{op}: MMPACK_BACKEND is {wanted}, and {reason}. Fix: MMPACK_BACKEND=auto"
        )
    return wanted


def why_not(
    op: str, backend: str, device: torch.device, dtype: torch.dtype | None = None
) -> str | None:
    """Why `backend` can't run `op` on `device`; None where it can."""
    if backend == "torch":
        return None
    if backend not in KERNELS[op]:
        return f"the op has no {backend} kernel"
    if op == "linear_selected_logprobs" and dtype not in (None, *HALVES):
        return f"its kernels take bf16 and fp16, not {dtype}"
    if op in PACKS:
        if backend == "cuda" and dtype not in (None, torch.uint8):
            return f"csrc/ packs bytes, not {dtype}"
    elif dtype == torch.float64:
        return "the kernels compute in float32, not in float64"
    return _why_no_triton(device.type) if backend == "triton" else _why_no_cuda(device.type)


def kernels_of(backend: str, triton: str) -> Any:
    """The module with an op's kernels: `triton` names Triton's, native has all of csrc/."""
    return importlib.import_module("mmpack.ops.native" if backend == "cuda" else triton)


def report(device: torch.device) -> list[tuple[str, str | None, str]]:
    """For each op with kernels: its name, the backend that runs it on `device` (None: it would raise), and why."""
    rows: list[tuple[str, str | None, str]] = []
    forced = os.environ.get("MMPACK_BACKEND") or "auto"
    for op, kernels in KERNELS.items():
        reasons = {b: why_not(op, b, device) for b in kernels}
        passed = "; ".join(f"{b}: {reason}" for b, reason in reasons.items() if reason)
        try:
            backend = choose(op, device)
        except BackendError as error:
            rows.append((op, None, str(error)))
            continue
        if forced != "auto":
            why = f"MMPACK_BACKEND={forced}"
        elif device.type == "cpu":
            why = "on a CPU"
        else:
            why = passed or "the first that can run"
        rows.append((op, backend, why))
    return rows


def _why_no_triton(device_type: str) -> str | None:
    if not _installed("triton"):
        return "triton is not installed (pip install 'mmpack[triton]')"
    if device_type == "cpu":
        # As triton itself reads it, when its kernels are defined.
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "triton runs on the CPU under TRITON_INTERPRET=1 alone"
    return None if device_type == "cuda" else f"triton has no {device_type} device"


def _why_no_cuda(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"csrc/ has no {device_type} code"
    if torch.version.hip is not None:
        return "csrc/ is built for CUDA alone"
    from mmpack.ops import native

    return native.why_not()


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
