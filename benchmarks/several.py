"""What the benchmarks of several GPUs share: a process for each GPU of this host (NCCL), or of `--ranks` (gloo).

Without a GPU nothing is written unless `--out` names a file: rows are printed, to see what is checked. Each row also
goes to stderr as soon as it is measured, so that a run that is cut off leaves its figures.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import distributed

from benchmarks.step.report import short, versions

Rows = list[dict[str, Any]]
Work = Callable[[torch.device, Any], Rows]
SIZES = (1, 2, 4, 8)


def measured(name: str, work: Work, options: Any) -> None:
    """Run `work` on all ranks, and write the first one's rows."""
    gpus = torch.cuda.device_count()
    ranks = options.ranks or gpus or 2
    if gpus == 1:
        return print(f"{name}: there is one GPU, two are needed: results stay as they are")
    if gpus and ranks > gpus:
        sys.exit(f"{name}: {gpus} GPUs for {ranks} ranks. Fix: pass --ranks {gpus}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (ranks, folder, work, options), nprocs=ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    if gpus:
        floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
        return gpu.write(options.out, name, floors, rows)
    rows = [short(row) for row in rows]
    print(*map(json.dumps, rows), sep="\n")
    if options.out:
        report = {"op": name, "command": gpu.command(), "device": "CPU", "versions": versions()}
        options.out.write_text(json.dumps(report | {"floors": {}, "rows": rows}, indent=1) + "\n")


def _process(rank: int, ranks: int, folder: str, work: Work, options: Any) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # what is checked in float32 is float32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        device_id=None if device.type == "cpu" else device,
    )
    rows = work(device, options)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def groups() -> dict[int, Any]:
    """Groups of the first 1, 2, 4 … ranks, by their number; every rank makes all of them."""
    ranks = distributed.get_world_size()
    return {n: distributed.new_group(list(range(n))) for n in SIZES if n <= ranks}


def seconds(
    call: Callable[[], Any], repeats: int, device: torch.device, group: Any = None
) -> float:
    """Median seconds of the slowest rank; on a CPU of one call, where it says nothing."""
    taken = []
    for _ in range(repeats if device.type == "cuda" else 1):
        distributed.barrier(group=group)
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    times = torch.tensor(taken, dtype=torch.float64, device=device)
    distributed.all_reduce(times, distributed.ReduceOp.MAX, group=group)
    return float(times.median())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tell(device: torch.device, what: str) -> None:
    """A line of the first rank, to see how far it is."""
    if distributed.get_rank() == 0 and device.type == "cuda":
        print(what, file=sys.stderr, flush=True)


def say(row: dict[str, Any]) -> None:
    """A row that is measured, by the first rank."""
    if distributed.get_rank() == 0:
        print(json.dumps(short(row)), file=sys.stderr, flush=True)
