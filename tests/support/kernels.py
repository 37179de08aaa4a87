"""Tests of Triton's kernels: interpreted where there is no GPU."""

import pytest
import torch

from mmpack.ops.backend import Op, choose

# Each test runs on the plain version, and (marked kernel, in that environment) on Triton's.
each_backend = pytest.mark.parametrize(
    "device", ["torch", pytest.param("triton", marks=pytest.mark.kernel)], indirect=True
)


def device_of_kernels(backend: str = "triton") -> torch.device:
    on_gpu = backend == "triton" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def running(path: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Force ops to "torch", on the CPU, or to "triton": on a GPU if there is one, else interpreted."""
    monkeypatch.setenv("MMPACK_BACKEND", path)
    return torch.device("cpu") if path == "torch" else device_of_kernels()


def chosen(op: Op, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton's kernels run; `op` is forced to its own."""
    device = device_of_kernels()
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    assert choose(op, device) == "triton"
    return device


def poison_outputs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What is not written stays NaN: in tensors from new_empty, and in memory that comes from the allocator."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *shape, **keywords) -> torch.Tensor:
        made = new_empty(self, *shape, **keywords)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    if device.type == "cuda":
        for size in (1 << 8, 1 << 12, 1 << 16, 1 << 22):
            _ = [torch.full((size,), torch.nan, device=device) for _ in range(8)]
