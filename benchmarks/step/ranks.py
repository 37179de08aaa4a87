"""Processes of one benchmark under torchrun; without it, one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mmpack.errors import ArgumentError


@contextmanager
def of_this_run(fsdp: bool) -> Iterator[tuple[torch.device, int, int]]:
    """Device, rank and ranks; under torchrun the process group, for as long as the block runs."""
    cuda = torch.cuda.is_available()
    if not fsdp:
        yield torch.device("cuda" if cuda else "cpu"), 0, 1
        return
    if "RANK" not in os.environ:
        raise ArgumentError(
            "benchmarks.step: --fsdp needs one process per GPU. "
            "Fix: run torchrun --nproc-per-node N -m benchmarks.step --fsdp …"
        )
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield device, dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # after an error other ranks may still wait


def summed(values: list[float]) -> list[float]:
    """Each value, summed over the ranks."""
    return _reduced(values, "SUM")


def largest(value: float) -> float:
    """The largest of the ranks' values."""
    return _reduced([value], "MAX")[0]


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: Any) -> torch.Tensor:
    """All ranks' parts of a tensor that may be sharded: every rank calls."""
    every: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return every


def wait_for_all() -> None:
    """Until every rank is here."""
    if _several():
        dist.barrier()


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def _reduced(values: list[float], how: str) -> list[float]:
    if not _several():
        return values
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, getattr(dist.ReduceOp, how))
    return [float(value) for value in reduced.tolist()]
