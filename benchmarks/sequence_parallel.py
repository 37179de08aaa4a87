"""Packs of 64k rows, split over the GPUs of one host (Ulysses, NCCL): seconds and memory of a step by ranks.

    python benchmarks/sequence_parallel.py
    python benchmarks/sequence_parallel.py --tiny --ranks 2   # on a CPU, by gloo: what is checked, not how fast it is

A step is forward, loss and backward of one pack, and the sum of gradients over the ranks, which each have all weights.
First, with few decoder layers, logprobs and gradients of the same packs: their error beside the same in more digits
(float32 for bf16, float64 for float32; a prompt at a time) must be that of one rank, within the contract. Times and
memory are the slowest and the fullest rank's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu
import several
import torch
from torch import distributed

import mmpack as mp
from benchmarks.step.models import MODELS, build
from benchmarks.step.workloads import WORKLOADS, Workload, draw, tiny
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.contracts import TOLERANCES, parameter_gradient_bound

NAME = "sequence_parallel"
# each about 64k rows
PACKS = {
    "7 prompts with a picture, 8 answers each": replace(WORKLOADS["geo"], prompts=7),
    "4 long answers": replace(WORKLOADS["long"], responses=1, shortest=16_000, longest=16_000),
    "one video, one long answer": Workload(
        "256 frames", 17_000, 1, 48_000, 48_000, 224, frames=256, prompts=1
    ),
}
CHECKED_LAYERS = 2
REPEATS = 3


def main() -> None:
    options = gpu.arguments(
        NAME,
        model={"choices": sorted(MODELS), "default": "qwen2.5-vl-3b"},
        layers={"type": int, "help": "of the decoder, fewer than the model's own"},
        ranks={"type": int, "help": "processes; as many as there are GPUs unless given"},
        tiny={"action": "store_true", "help": "smoke's model of the family and small packs"},
    )
    several.measured(NAME, measure, options)


def measure(device: torch.device, options: Any) -> several.Rows:
    groups, rank = several.groups(), distributed.get_rank()
    errors = checked(device, options, groups)
    rows = []
    model = build(options.model, device, options.layers, options.tiny)
    with attach(model):
        for name, workload in PACKS.items():
            batch = mp.pack(samples_of(workload, options, model), share_prefix=True).to(device)
            alone: Any = None
            for size, group in groups.items():
                if rank >= size:
                    continue
                several.tell(device, f"{name}: {size} ranks")
                logprobs = step(model, batch, group).detach()
                alone = logprobs if alone is None else alone  # of rank 0 and one rank
                row = {"pack": name, "rows": len(batch.input_ids), "ranks": size}
                row |= timed(model, batch, group)
                rows.append(row | errors.get((name, size), {}))
                rows[-1]["logprobs_off_rms"] = rms(logprobs - alone)
                several.say(rows[-1])
            distributed.barrier()
    first = {row["pack"]: row for row in rows if row["ranks"] == 1}
    for row in rows if rank == 0 else ():
        one = first[row["pack"]]
        row["speed_up"] = one["seconds"] / row["seconds"]
        if row["peak_bytes"]:
            row["of_one_rank_memory"] = row["peak_bytes"] / one["peak_bytes"]
            row["of_one_rank_beyond_weights"] = (
                row["beyond_weights_bytes"] / one["beyond_weights_bytes"]
            )
    return rows


def samples_of(workload: Workload, options: Any, model: Any) -> list[mp.Sample]:
    asked = tiny(workload) if options.tiny else workload
    dtype = next(model.parameters()).dtype
    return draw(asked, MODELS[options.model].family, dtype)[0]


def step(model: Any, batch: Any, group: Any) -> torch.Tensor:
    """Logprobs [N]; gradients are summed over the group."""
    model.zero_grad(set_to_none=True)
    logprobs = packed_logprobs(model, batch, sequence_group=group)
    (logprobs * weights(len(logprobs), batch.device)).sum().backward()
    for p in model.parameters():
        if p.grad is not None:
            distributed.all_reduce(p.grad, group=group)
    return logprobs


def weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, count, device=device) / count


def timed(model: Any, batch: Any, group: Any) -> dict[str, float]:
    """Of the ranks of the group."""
    model.zero_grad(set_to_none=True)
    cuda = batch.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = several.seconds(lambda: step(model, batch, group), REPEATS, batch.device, group)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    model.zero_grad(set_to_none=True)
    both = torch.tensor([peak, peak - before], dtype=torch.float64, device=batch.device)
    distributed.all_reduce(both, distributed.ReduceOp.MAX, group=group)
    peak, beyond = map(int, both.tolist())
    return {"seconds": seconds, "peak_bytes": peak, "beyond_weights_bytes": beyond}


def checked(device: torch.device, options: Any, groups: Any) -> dict[tuple[str, int], Any]:
    """Errors of each pack and number of ranks, on the first rank; beyond the contract nothing is measured."""
    rank, out = distributed.get_rank(), {}
    model = build(options.model, device, CHECKED_LAYERS, options.tiny)
    for name, workload in PACKS.items():
        samples = samples_of(workload, options, model)
        batch = mp.pack(samples, share_prefix=True).to(device)
        exact = in_more_digits(model, samples) if rank == 0 else None
        one: Any = None
        for size, group in groups.items():
            if rank >= size:
                continue
            several.tell(device, f"checking {name}: {size} ranks")
            with attach(model):
                logprobs = step(model, batch, group).detach()
            if exact is None:
                continue
            found = errors(logprobs, gradients(model), *exact)
            one = found if one is None else one
            within(found, one, next(model.parameters()).dtype, f"{name}, {size} ranks")
            out[name, size] = found
        distributed.barrier()
    return out


def in_more_digits(model: Any, samples: list[mp.Sample]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logprobs and gradients of one process, a pack for each prompt."""
    wide = torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(model).to(wide)
    exact.zero_grad(set_to_none=True)
    device, logprobs = exact.device, []
    share = weights(sum(s.num_loss_tokens for s in samples), device).to(wide)
    with attach(exact):
        for group in by_prompt(samples):
            for medium in group[0].media:
                medium.pixel_values = medium.pixel_values.to(wide)
            found = packed_logprobs(exact, mp.pack(group, share_prefix=True).to(device))
            (found * share[: len(found)]).sum().backward()
            share = share[len(found) :]
            logprobs.append(found.detach())
    return torch.cat(logprobs), gradients(exact)


def by_prompt(samples: list[mp.Sample]) -> Iterator[list[mp.Sample]]:
    for group in dict.fromkeys(s.group_id for s in samples):
        yield [s for s in samples if s.group_id == group]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(
    logprobs: torch.Tensor, found: dict[str, Any], exact: torch.Tensor, wanted: dict[str, Any]
) -> dict[str, float]:
    gpu.require(found.keys() == wanted.keys(), "the same weights have gradients")
    away = sum(float((found[n].to(g.dtype) - g).norm()) ** 2 for n, g in wanted.items())
    size = sum(float(g.norm()) ** 2 for g in wanted.values())
    return {"logprob_error_rms": rms(logprobs - exact), "gradient_error": (away / size) ** 0.5}


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def within(found: dict[str, float], one: dict[str, float], dtype: Any, what: str) -> None:
    share = TOLERANCES["parameter_gradient_vs_separate"].value
    nats = max(share * one["logprob_error_rms"], TOLERANCES["layouts"].value)
    half = dtype != torch.float32
    bounds = {
        "logprob_error_rms": nats,
        "gradient_error": parameter_gradient_bound(one["gradient_error"], half=half),
    }
    for name, bound in bounds.items():
        gpu.require(found[name] <= bound, f"{name} of {what}: {found[name]}, beyond {bound}")


if __name__ == "__main__":
    main()
