"""Tests of an op on each of its kernels: Triton (interpreted where there is no GPU), and csrc/ on a GPU."""

import functools
import shutil
import subprocess
import sys

import pytest
import torch

from mmpack.ops.backend import Op, choose

each_backend = pytest.mark.parametrize(
    "backend_device", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@functools.cache
def build_native() -> None:
    """Compile csrc/, in a process of its own, as people do; skip where there is no nvcc."""
    from mmpack.ops.build import library

    if library() is not None:
        return
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    command = [sys.executable, "-m", "mmpack.ops.build"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    library.cache_clear()


def device_of(backend: str) -> torch.device:
    if backend == "cuda":
        build_native()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def chosen(op: Op, backend: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of `backend`; csrc/ is left to auto, for Triton has the dtypes and gradients that it has not."""
    device = device_of(backend)
    monkeypatch.setenv("MMPACK_BACKEND", "auto" if backend == "cuda" else backend)
    assert choose(op, device) == backend
    return device


def poison_outputs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What is not written stays NaN: in tensors from new_empty, and in memory that csrc/ gets from the allocator."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *shape, **keywords) -> torch.Tensor:
        made = new_empty(self, *shape, **keywords)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    if device.type == "cuda":
        for size in (1 << 8, 1 << 12, 1 << 16, 1 << 22):
            _ = [torch.full((size,), torch.nan, device=device) for _ in range(8)]
