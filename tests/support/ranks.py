"""Processes of a test, on the CPU by gloo or each on a GPU by NCCL; and their gradients beside one process's."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Gradients, relative_difference
from torch import distributed

from mmpack.contracts import TOLERANCES

BOUND = 1e-5  # of the norm of a weight's gradient
# of a weight's on a GPU, where products of other shapes are other kernels; all together are held to the contract
GPU_BOUND = 1e-3
# Ranks on the CPU are forks of one process, which imports once what takes seconds.
LOADED = ["mmpack.adapters.transformers", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"]
LOADED += ["mmpack.adapters.megatron", "megatron.core.models.gpt.gpt_layer_specs"]
LOADED += ["mmpack.demo.tiny_models", "hypothesis", "pytest", "torch.distributed.fsdp"]


def spawned(
    run: Callable[..., None], ranks: int, tmp_path: Any, *args: Any, on: str = "cpu"
) -> None:
    """`run(rank, ranks, *args)` in processes that are one group; `on`: "cpu", or "cuda" with a GPU for each."""
    if on == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    multiprocessing.set_forkserver_preload(LOADED)
    start = "forkserver" if on == "cpu" else "spawn"
    args = (run, ranks, str(tmp_path / "rendezvous"), on, args)
    torch.multiprocessing.start_processes(_run, args, ranks, start_method=start)


def _run(
    rank: int, run: Callable[..., None], ranks: int, rendezvous: str, on: str, args: Any
) -> None:
    torch.set_num_threads(1)
    device = None
    if on == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    distributed.init_process_group(
        "gloo" if device is None else "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=240),  # of ranks that wait for ever
        device_id=device,
    )
    run(rank, ranks, *args)
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that gloo left may abort an interpreter that ends


def here() -> torch.device:
    """The device of this process's group."""
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gradients_of(model: Any) -> Gradients:
    """Whole ones, by names without a wrapper's prefix."""
    named = model.named_parameters()
    return {n.removeprefix("module."): whole(p.grad) for n, p in named if p.grad is not None}


def logprob_bound() -> float:
    """Of two float32 results: on a GPU the head's is that of its kernel."""
    return TOLERANCES["layouts" if here().type == "cpu" else "linear_logprob"].value


def gradient_bound() -> float:
    """Of all gradients of two float32 results, relative."""
    name = "parameter_gradient_floor" if here().type == "cpu" else "parameter_gradient_fp32"
    return TOLERANCES[name].value


def whole(x: Any) -> torch.Tensor:
    """Of a DTensor all ranks' parts."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_gradients(model: Any, wanted: Gradients, told: Any = "", most: float = BOUND) -> None:
    """Each trained weight's of `wanted` within `most` of its norm; on a GPU further, and all within the contract."""
    found = gradients_of(model)
    named = model.named_parameters()
    frozen = {name.removeprefix("module.") for name, p in named if not p.requires_grad}
    wanted = {name: gradient for name, gradient in wanted.items() if name not in frozen}
    assert wanted, told
    on_gpu = here().type == "cuda"
    for name, gradient in wanted.items():
        assert name in found, (name, told)
        off = (found[name].float() - gradient.float()).norm()
        bound = max(most, GPU_BOUND) if on_gpu else most
        assert off <= bound * gradient.float().norm() + 1e-7, (name, told, float(off))
    if on_gpu and most == BOUND:
        off = relative_difference({name: found[name] for name in wanted}, wanted)
        assert off <= gradient_bound(), (told, off)
