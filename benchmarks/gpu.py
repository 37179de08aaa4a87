"""What the benchmarks of one GPU share: times by CUDA events, the two floors of this run, memory, and the report.

A time is the median of `repeats` calls after warm-ups, in ms. Floors are measured in the same process, since a card's
rates move from day to day: a large copy on the device (bytes read + written), and cuBLAS's product; `in_turn` with the
call where its heat matters too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from on_host import command

from benchmarks.step.report import short

RESULTS = Path(__file__).parent / "results"
AHEAD_CYCLES = 2_000_000  # about 1 ms
CYCLES_PER_SECOND = 2e9  # about
COPIED = 4 << 30  # bytes


def milliseconds(
    call: Callable[[], Any], repeats: int = 11, warmups: int = 3, ahead: bool = False
) -> float:
    """Median time of `call` on the GPU.

    `ahead`: the GPU waits first, so that the host's launches run ahead of it, as they do in a training step; else the
    time of launching counts.
    """
    return _measured([call], repeats, warmups, ahead)[0]


def in_turn(calls: list[Callable[[], Any]], repeats: int = 11, warmups: int = 2) -> list[float]:
    """Median time of each call on the GPU, the calls run in turn, the host ahead.

    A card's clock follows its load and heat: a long op and its floor are compared at the same.
    """
    return _measured(calls, repeats, warmups, ahead=True)


def _measured(
    calls: list[Callable[[], Any]], repeats: int, warmups: int, ahead: bool
) -> list[float]:
    cycles = [AHEAD_CYCLES] * len(calls)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(warmups + repeats):
        for i, call in enumerate(calls):
            if turn < warmups:
                torch.cuda.synchronize()
            if ahead and turn >= warmups:
                torch.cuda._sleep(cycles[i])
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            start.record()
            call()
            stop.record()
            if turn < warmups:  # twice what the host takes, with what it waits for inside the call
                host = time.perf_counter() - begun
                cycles[i] = max(AHEAD_CYCLES, int(2 * host * CYCLES_PER_SECOND))
            stop.synchronize()
            if turn >= warmups:
                times[i].append(start.elapsed_time(stop))
    return [statistics.median(taken) for taken in times]


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    """`call` as one replay of a CUDA graph: what the GPU takes, without the host's launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host_microseconds(call: Callable[[], Any], calls: int = 200) -> float:
    """Host time of one call in µs, the GPU running behind."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / calls * 1e6


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory that `call` holds beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def copy() -> Callable[[], Any]:
    """A copy of COPIED bytes on the device."""
    source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    return lambda: target.copy_(source)


def copy_bytes_per_second() -> float:
    """Bandwidth of a copy on the device, bytes read + bytes written."""
    return 2 * COPIED / milliseconds(copy()) * 1e3


def product_milliseconds(
    rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16
) -> float:
    """cuBLAS's bare product [rows, depth] · [depth, columns] on random numbers; 2 · rows · columns · depth FLOPs."""
    a = torch.randn(rows, depth, device="cuda", dtype=dtype)
    b = torch.randn(columns, depth, device="cuda", dtype=dtype)
    out = torch.empty(rows, columns, device="cuda", dtype=dtype)
    return milliseconds(lambda: torch.mm(a, b.T, out=out), repeats=9)


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    properties = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers", "flash-attn-4", "fla-core", "tilelang"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "versions": versions,
    }


def arguments(name: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """`--out FILE` (benchmarks/results/NAME.json unless given), and what `extra` names: keywords of `add_argument`.

    Without a GPU `out` is None unless given.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    default = RESULTS / f"{name}.json" if torch.cuda.is_available() else None
    parser.add_argument("--out", type=Path, default=default)
    for option, keywords in extra.items():
        parser.add_argument(f"--{option.replace('_', '-')}", **keywords)
    return parser.parse_args()


def write(out: Path, op: str, floors: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Write the results of one op as JSON, each row one measurement, and print them one per line.

    `floors`: `copy_bytes_per_second`, and `product_ms` where there is a product.
    """
    report = {"op": op, "command": command(), **machine()}
    report |= {"floors": short(floors), "rows": [short(row) for row in rows]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        print(json.dumps(row), flush=True)


def require(holds: bool, what: str) -> None:
    """Stop the benchmark where the contract doesn't hold: a wrong op's speed is of no interest."""
    if not holds:
        sys.exit(f"the contract does not hold, nothing is measured: {what}")
