"""The axes of one process, and the report of all; those of ranks are in ranks.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import transformers
from chain.compare import Equal, Row
from chain.job.options import ONE_PROCESS, RANKS, Options
from chain.job.prepare import prepare
from chain.job.ranks import on_ranks, refuse_ranks
from chain.passes.axes import (
    OWN_ATTENTION,
    axes_here,
    equal_stages,
    processed_run,
    within_mode,
)
from chain.report import ChainReport

from mmpack._version import __version__
from mmpack.adapters.transformers.tower import takes_encoded_media
from mmpack.errors import ArgumentError
from mmpack.progress import tracked


def chain(options: Options) -> ChainReport:
    """Run the axes and compare each stage with the reference: every sample alone, batch 1, no cache, one rank.

    Axes of ranks run in the processes of torchrun, or on the CPU in processes that are started here. Of torchrun's
    ranks the first has the rows.
    Raises: ArgumentError for a device that isn't there, or axes that can't run.
    """
    start = time.perf_counter()
    device = _device(options.device)
    refuse_ranks(options)
    report = ChainReport(_setting(options, device))
    if any(axis in ONE_PROCESS for axis in options.axes) and int(os.environ.get("RANK", "0")) == 0:
        report.rows += _one_process(options, device, report.left_out)
    if any(axis in RANKS for axis in options.axes):
        report.rows += on_ranks(options, device, report.left_out)
    report.seconds = time.perf_counter() - start
    return report


def _one_process(options: Options, device: torch.device, left_out: dict[str, str]) -> list[Row]:
    prepared = prepare(options, device)
    axes = axes_here(prepared.model)
    axes["processor_cache"] = {"off": processed_run(prepared.uncached)}
    rows = list(prepared.alone)
    for axis in tracked(options.axes, "comparing layouts"):
        if axis in RANKS:
            continue
        if axis not in axes:
            left_out[axis] = _why_not(prepared.model)
            continue
        for value, take in axes[axis].items():
            equal = Equal()
            if options.invariant:
                if (axis, value) in OWN_ATTENTION:
                    left_out[f"{axis} {value}"] = "transformers' own attention is not invariant"
                    continue
                equal, take = Equal(*equal_stages(axis, value)), within_mode(take)
            rows += prepared.rows(axis, value, take(prepared.model, prepared.problem), equal)
    return rows


def _why_not(model: Any) -> str:
    if not takes_encoded_media(model):
        return f"transformers {transformers.__version__} takes no encoded media. Fix: install 5.19 or newer"
    return "the model has linear attention, whose state is not KV per token"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"chain: device is {name!r}. Fix: use 'cpu' or 'cuda'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError("chain: there is no CUDA device. Fix: use --device cpu")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ArgumentError(f"chain: device is {name!r}. Fix: use 'cpu' or 'cuda'")
    return device


def _setting(options: Options, device: torch.device) -> dict[str, Any]:
    names = [] if device.type == "cpu" else [torch.cuda.get_device_name(device)]
    return {
        "model": options.model,
        "size": options.size,
        "layers": options.layers,
        "dtype": options.dtype,
        "device": (names or ["cpu"])[0],
        "invariant": options.invariant,
        "seed": options.seed,
        "mmpack": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
