"""Packs of 64k rows, split over the GPUs of one host (Ulysses, NCCL): seconds and memory of a step by ranks.

    python benchmarks/sequence_parallel.py
    python benchmarks/sequence_parallel.py --tiny --ranks 2   # on a CPU, by gloo: what is checked, not how fast it is

A step is forward, loss and backward of one pack, and the sum of gradients over the ranks, which each have all weights.
Logprobs and gradients are checked against those of one rank first. Times and memory are the slowest and fullest rank's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import distributed

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.bench.models import MODELS, build
from mmpack.bench.workloads import WORKLOADS, Workload, draw, tiny
from mmpack.contracts import TOLERANCES

NAME = "sequence_parallel"
# each about 64k rows: shared prompts with pictures; a few long answers; one long video with one long answer
PACKS = {
    "shared": replace(WORKLOADS["geo"], prompts=7),
    "long": replace(WORKLOADS["long"], responses=1, shortest=16_000, longest=16_000),
    "one": Workload("256 frames", 17_000, 1, 48_000, 48_000, 224, frames=256, prompts=1),
}
REPEATS = 3


def main() -> None:
    options = gpu.arguments(
        NAME,
        model={"choices": sorted(MODELS), "default": "qwen2.5-vl-3b"},
        layers={"type": int, "help": "of the decoder, fewer than the model's own"},
        ranks={"type": int, "help": "processes; as many as there are GPUs unless given"},
        tiny={"action": "store_true", "help": "smoke's model of the family and small packs"},
    )
    ranks = options.ranks or max(torch.cuda.device_count(), 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(measure, (ranks, folder, out, options), nprocs=ranks)
        rows = json.loads(out.read_text())
    if torch.cuda.is_available():
        gpu.write(options.out, NAME, {"copy_bytes_per_second": gpu.copy_bytes_per_second()}, rows)
    else:
        print(*map(json.dumps, rows), sep="\n")


def measure(rank: int, ranks: int, folder: str, out: Path, options: Any) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        device_id=device if device.type == "cuda" else None,
    )
    model = build(options.model, device, options.layers, options.tiny)
    family, dtype = MODELS[options.model].family, next(model.parameters()).dtype
    sizes = [n for n in (1, 2, 4, 8) if n <= ranks]
    groups = {n: distributed.new_group(list(range(n))) for n in sizes}
    rows = []
    with attach(model):
        for name, workload in PACKS.items():
            samples, _ = draw(tiny(workload) if options.tiny else workload, family, dtype)
            batch = mp.pack(samples, share_prefix=True).to(device)
            one: Any = None
            for size in sizes:
                if rank >= size:
                    continue
                found = step(model, batch, groups[size])
                one = found if one is None else one  # of rank 0 and one rank: the oracle
                off = check(found, one, f"{name} on {size} ranks") if rank == 0 else {}
                del found
                taken = timed(model, batch, groups[size])
                rows.append(
                    {"pack": name, "rows": len(batch.input_ids), "ranks": size} | taken | off
                )
            distributed.barrier()
    if rank == 0:
        first = {row["pack"]: row for row in rows if row["ranks"] == 1}
        for row in rows:
            alone = first[row["pack"]]
            row["speed_up"] = alone["seconds"] / row["seconds"]
            if row["peak_bytes"]:
                row["of_one_rank_memory"] = row["peak_bytes"] / alone["peak_bytes"]
        out.write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def step(model: Any, batch: Any, group: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs [N], and gradients of all weights, on the CPU."""
    logprobs = run(model, batch, group)
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach().cpu(), found


def run(model: Any, batch: Any, group: Any) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    logprobs = packed_logprobs(model, batch, sequence_group=group)
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    (logprobs * weights).mean().backward()
    for p in model.parameters():
        if p.grad is not None:
            distributed.all_reduce(p.grad, group=group)
    return logprobs


def check(found: Any, one: Any, what: str) -> dict[str, float]:
    """How far values are off those of one rank; stops the benchmark beyond the contract, which has no bound for bf16's
    logprobs.
    """
    wide = next(iter(one[1].values())).dtype == torch.float32
    off = float((found[0] - one[0]).abs().max())
    gpu.require(off <= TOLERANCES["layouts"].value or not wide, f"logprobs, {what}: {off}")
    parts = [(found[1][n].double() - g.double(), g.double()) for n, g in one[1].items()]
    total = sum(float(g.square().sum()) for _, g in parts) ** 0.5
    error = sum(float(d.square().sum()) for d, _ in parts) ** 0.5 / total
    kind = "parameter_gradient_fp32" if wide else "parameter_gradient_bf16"
    gpu.require(error <= TOLERANCES[kind].value, f"gradients, {what}: {error}")
    return {"logprobs_off": off, "gradients_off": error}


def timed(model: Any, batch: Any, group: Any) -> dict[str, float]:
    """Median seconds of a step, and the largest memory, over the ranks of the group."""
    cuda = batch.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(REPEATS):
        distributed.barrier(group=group)
        start = time.perf_counter()
        run(model, batch, group)
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    both = torch.tensor([sorted(taken)[REPEATS // 2], peak], dtype=torch.float64).to(batch.device)
    distributed.all_reduce(both, distributed.ReduceOp.MAX, group=group)
    model.zero_grad(set_to_none=True)
    return {"seconds": float(both[0]), "peak_bytes": int(both[1])}


if __name__ == "__main__":
    main()
