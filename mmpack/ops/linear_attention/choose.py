"""Which implementation of the delta rule runs: chosen by device, dtype and installed packages, never by trying.

`auto` is flash-linear-attention for half precision on a GPU, and our chunks in plain torch elsewhere: float32 is asked
for to be exact, and FLA's products round it to TF32. MMPACK_LINEAR_ATTENTION=auto|torch|fla names one.
"""

from __future__ import annotations

import os
import re

import torch

from mmpack.errors import BackendError, installed_version
from mmpack.ops import invariance

NAMES = ("torch", "fla")
VARIABLE = "MMPACK_LINEAR_ATTENTION"
HALF = (torch.bfloat16, torch.float16)
MOST_KEYS = 256  # Dk that FLA's kernels take
FIX = f"{VARIABLE}=torch, which is slow on a GPU"
# Their backward is wrong on Hopper (flash-linear-attention#640), and FLA then refuses it, unless tilelang computes it.
WRONG_TRITON = ((3, 4, 0), (3, 7, 1))


def choose(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int = 128,
    gradients: bool = True,
    asked: str = "auto",
) -> str:
    """`torch` or `fla`, for queries of [T, Hk, key_dim] on `device`.

    Args: gradients: whether a backward comes. asked: before the variable, if it is not `auto`.

    Raises BackendError for an unknown name, for one that was asked for and can't run, and where `auto` is FLA, which is
    not installed or refuses this GPU: it is never slow without a word.
    """
    named = asked if asked != "auto" else os.environ.get(VARIABLE) or "auto"
    if named not in ("auto", *NAMES):
        raise BackendError(
            f"linear attention: {named!r} is not a backend. Fix: set {VARIABLE}=auto, or one of {', '.join(NAMES)}"
        )
    if named == "auto" and (device.type == "cpu" or dtype not in HALF):
        named = "torch"
    if named == "torch":
        if invariance.is_on() and device.type != "cpu":
            raise BackendError(
                "linear attention: on a GPU, no implementation gives bits that are independent of the batch. "
                "Fix: leave batch_invariant, or run on a CPU"
            )
        return named
    reason = why_not_fla(device, dtype, key_dim, gradients)
    if reason is not None:
        what, fix = reason
        raise BackendError(f"linear attention: fla can't run: {what}. Fix: {fix}")
    return "fla"


def why_not_fla(
    device: torch.device, dtype: torch.dtype, key_dim: int = 128, gradients: bool = True
) -> tuple[str, str] | None:
    """Why flash-linear-attention can't run for such queries, and what helps; None where it can."""
    if device.type == "cpu":
        return "it needs a GPU, not cpu", f"{VARIABLE}=auto"
    if dtype not in (*HALF, torch.float32):
        return f"it can't take {dtype}", f"{VARIABLE}=auto"
    if key_dim > MOST_KEYS:
        return f"keys have {key_dim} dimensions, it takes {MOST_KEYS}", FIX
    if invariance.is_on():
        return "its bits may depend on the batch", "leave batch_invariant, or run on a CPU"
    if installed_version("fla-core") is None:
        return "fla-core is not installed", f"pip install 'mmpack[fla]', or {FIX}"
    if gradients and _refuses_backward(device):
        version = installed_version("triton")
        return (
            f"it refuses its backward on Hopper GPUs under triton {version}, from 3.4.0 to before 3.7.1",
            f"pip install tilelang, with nvcc (of a CUDA toolkit, or pip install nvidia-cuda-nvcc), "
            f"or triton>=3.7.1 with a torch that takes it, or {FIX}",
        )
    return None


def report(device: torch.device) -> tuple[str, str | None, str]:
    """What it is, what auto takes on `device` for bf16 (None: it would raise), and why; as `ops.backend.report`."""
    what, name = "linear attention", os.environ.get(VARIABLE) or "auto"
    try:
        chosen = choose(device, torch.bfloat16)
    except BackendError as error:
        return what, None, str(error)
    if name != "auto":
        return what, chosen, f"{VARIABLE}={name}"
    return what, chosen, "on a CPU" if device.type == "cpu" else "half precision on a GPU"


def _tilelang_runs() -> bool:
    """As FLA itself decides: it needs nvcc too."""
    if installed_version("tilelang") is None:
        return False
    from fla.backends import TileLangBackend  # type: ignore[import-not-found]

    return bool(TileLangBackend.can_use())


def _refuses_backward(device: torch.device) -> bool:
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if _tilelang_runs():
        return False
    least, fixed = WRONG_TRITON
    numbers = re.findall(r"\d+", installed_version("triton") or "0")[:3]
    return least <= tuple(int(n) for n in numbers) < fixed
