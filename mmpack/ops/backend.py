"""Which implementation of an op runs: chosen by device, by what is installed and by MMPACK_BACKEND, never by trying.

`torch` runs on anything, `triton` on CUDA and ROCm devices (on the CPU under TRITON_INTERPRET=1). `auto` takes Triton
where it can run, else torch. Each op declares itself next to its code, as an `Op`; its home has a module per backend,
of that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmpack.errors import BackendError, require
from mmpack.ops import first_use

require("torch", "torch", "mmpack.ops")

if TYPE_CHECKING:
    import torch

BACKENDS = ("torch", "triton")


@dataclass(frozen=True)
class Op:
    """An op: the modules `torch` and `triton` of the package `home` implement it."""

    name: str
    home: str
    only: tuple[
        str, ...
    ] = ()  # names of dtypes that Triton's kernel takes, as "uint8"; (): all but `never`
    never: tuple[str, ...] = ()
    why: str = ""  # the reason where a dtype does not fit, with {dtype} in its place


def implementation(op: Op, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The module that runs `op`: `torch` or `triton` of its home. Arguments and errors as of `choose`."""
    return _module(op.home, choose(op, device, dtype))


def choose(op: Op, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """The backend that `op` runs on for tensors of `device`, and of `dtype` where its kernels take only some.

    Raises BackendError where MMPACK_BACKEND names one that is unknown or that can't run this op here.
    """
    wanted = os.environ.get("MMPACK_BACKEND") or "auto"
    if wanted == "auto":
        if device.type == "cpu":
            return "torch"
        return "torch" if _why_not(op, device, dtype) else "triton"
    if wanted not in BACKENDS:
        raise BackendError(
            f"MMPACK_BACKEND is {wanted!r}. Fix: use one of auto, {', '.join(BACKENDS)}"
        )
    if wanted == "torch":
        return wanted
    reason = _why_not(op, device, dtype)
    if reason is not None:
        raise BackendError(
            f"{op.name}: MMPACK_BACKEND is {wanted}, but {reason}. Fix: set MMPACK_BACKEND=auto"
        )
    return wanted


def module_of(op: Op, *tensors: torch.Tensor) -> Any:
    """The module that runs `op` on these tensors, by the dtype that they promote to."""
    import torch

    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return implementation(op, tensors[0].device, dtype)


def ops_of(room: str) -> tuple[Op, ...]:
    """The ops that the packages of a room declare, package by package."""
    packages = pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}.")
    modules = [importlib.import_module(found.name) for found in packages if found.ispkg]
    declared = (x for module in modules for x in vars(module).values() if isinstance(x, Op))
    return tuple(dict.fromkeys(declared))


def report(ops: Iterable[Op], device: torch.device) -> list[tuple[str, str | None, str]]:
    """For each op: its name, the backend that runs it on `device` (None: it would raise), and why."""
    return [(op.name, *_reported(op, device)) for op in ops]


def _reported(op: Op, device: torch.device) -> tuple[str | None, str]:
    try:
        backend = choose(op, device)
    except BackendError as error:
        return None, str(error)
    forced = os.environ.get("MMPACK_BACKEND") or "auto"
    if forced != "auto":
        return backend, f"MMPACK_BACKEND={forced}"
    if device.type == "cpu":
        return backend, "on a CPU"
    return backend, _why_not(op, device, None) or "it can run"


def _why_not(op: Op, device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why Triton's kernel can't run on `device`; None where it can."""
    if dtype is not None and (op.only or op.never):
        name = str(dtype).removeprefix("torch.")
        if name in op.never or (op.only and name not in op.only):
            return op.why.format(dtype=dtype)
    if not _installed("triton"):
        return "triton is not installed (pip install 'mmpack[triton]')"
    if device.type == "cpu":
        # As triton itself reads it, when its kernels are defined.
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "triton runs on the CPU only under TRITON_INTERPRET=1"
    return None if device.type == "cuda" else f"triton has no {device.type} device"


@functools.cache
def _module(home: str, backend: str) -> Any:
    if backend == "triton":
        first_use.watch_triton()
    return importlib.import_module(f"{home}.{backend}")


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
