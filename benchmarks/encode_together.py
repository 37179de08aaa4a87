"""A step whose pictures lie on few ranks: as its samples come, planned, and with pictures encoded together.

    python benchmarks/encode_together.py
    python benchmarks/encode_together.py --tiny --ranks 2   # on a CPU, by gloo: what is checked, not how fast it is

The plan balances rows and patches at once. Where pictures are encoded together, it balances rows only, and the exchange
balances patches. Seconds of a step, forward and backward of all packs, of the slowest rank. The loss and the norm of
all gradients must be the same in all three ways.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gpu
import several
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from benchmarks.step.models import MODELS, build
from benchmarks.step.workloads import WORKLOADS, draw, tiny
from mmpack.adapters.transformers import attach, encode_together, in_step, packed_logprobs
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks

NAME = "encode_together"
PICTURE = 1200  # tokens of a prompt with one picture of 896 × 896
SAMPLES = 8  # of a rank; half as many with --tiny
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
    rows = []
    for size, group in several.groups().items():
        if size > 1 and distributed.get_rank() < size:
            for wrap in (data_parallel, sharded):
                model = wrap(build(options.model, device, options.layers, options.tiny), group)
                for skew, make in SKEWS.items():
                    rows += steps(model, skew, make(size, options, model), group, device)
                del model
                gc.collect()  # DistributedDataParallel holds itself
        distributed.barrier()
    return rows


def data_parallel(model: Any, group: Any) -> Any:
    ids = [model.device.index] if model.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, process_group=group)


def sharded(model: Any, group: Any) -> Any:
    mesh = DeviceMesh.from_group(group, model.device.type)
    for unit in (*decoder_layers(model), *tower_blocks(model), model):
        fully_shard(unit, mesh=mesh)
    return model


def one_sample(ranks: int, options: Any, model: Any) -> list[list[mp.Sample]]:
    """As many rows on each rank; those of the first are one sample, with a picture for every prompt of text."""
    count = samples_of_a_rank(options) // 2 * ranks
    [first] = drawn(options, model, "a", media=count, prompt=PICTURE * count)
    out = [[first]]
    for rank in range(1, ranks):
        texts = drawn(options, model, f"t{rank}", media=0, prompts=4 * count)
        while sum(map(len, texts)) > len(first):
            texts.pop()
        out.append(texts)
    return out


def a_quarter(ranks: int, options: Any, model: Any) -> list[list[mp.Sample]]:
    """Samples of as many rows, of which the first quarter has a picture each."""
    each = samples_of_a_rank(options)
    count = each * ranks
    samples = drawn(options, model, "a", prompts=count // 4)
    samples += drawn(options, model, "t", media=0, prompts=count - count // 4)
    return [samples[each * rank : each * (rank + 1)] for rank in range(ranks)]


def samples_of_a_rank(options: Any) -> int:
    return SAMPLES // 2 if options.tiny else SAMPLES


SKEWS = {
    "all pictures in one sample": one_sample,
    "pictures in a quarter of the samples": a_quarter,
}


def drawn(options: Any, model: Any, name: str, **asked: int) -> list[mp.Sample]:
    """One response of 900 tokens to each prompt; names of their own."""
    workload = replace(WORKLOADS["geo"], responses=1, shortest=900, longest=900)
    workload = replace(workload, **{"prompts": 1, **asked})
    if options.tiny:
        small = tiny(workload)
        prompt = 200 * workload.prompt // PICTURE
        workload = replace(small, responses=1, prompts=workload.prompts, prompt=prompt)
    samples, _ = draw(workload, MODELS[options.model].family, next(model.parameters()).dtype)
    return [
        replace(s, sample_id=f"{name}{s.sample_id}", group_id=f"{name}{s.group_id}")
        for s in samples
    ]


def steps(
    model: Any, skew: str, come: list[list[mp.Sample]], group: Any, device: torch.device
) -> several.Rows:
    """A row for each way."""
    rank, ranks = distributed.get_rank(group), len(come)
    samples = [s for own in come for s in own]
    most = max(max(map(len, samples)), sum(map(len, come[-1])) // 2 + 1)
    config = getattr(model, "module", model).config
    both = mp.planning.cost_model(config)
    text = replace(both, patch=0, frame_pair=0, tile_pair=0)

    def packs_of(plan: mp.Plan, given: list[mp.Sample], mine: list[int]) -> list[Any]:
        bins = [[given[i] for i in plan.bins[b]] for b in mine]
        packs = [mp.pack(b) if b else mp.idle_batch(config.model_type) for b in bins]
        return in_step(model, [pack.to(device) for pack in packs], group=group).packs

    own = mp.plan(come[rank], max_tokens=most)
    by_both = mp.plan(samples, max_tokens=most, ranks=ranks, cost=both)
    by_text = mp.plan(samples, max_tokens=most, ranks=ranks, cost=text)
    packs = packs_of(by_text, samples, by_text.ranks[rank])
    given = {"plan": by_text, "samples": samples, "group": group}
    ways = {
        "as they come": (packs_of(own, come[rank], own.ranks[0]), None),
        "planned": (packs_of(by_both, samples, by_both.ranks[rank]), None),
        "pictures encoded together": (packs, given),
    }
    out: several.Rows = []
    for way, (packs, given) in ways.items():
        how = "FSDP2" if model is getattr(model, "module", model) else "DistributedDataParallel"
        several.tell(device, f"{skew}, {how}, {way}: {ranks} ranks")
        row: dict[str, Any] = {"section": skew, "how": how, "ranks": ranks, "way": way}
        loss, patches = step(model, packs, given)
        row |= spread("patches", patches, group, device)
        row |= spread("rows", sum(len(p.input_ids) for p in packs), group, device)
        row |= {"loss": summed(loss, group, device), "gradient_norm": norm(model, group)}
        row["seconds"] = several.seconds(partial(step, model, packs, given), REPEATS, device, group)
        out.append(row)
        row["times_as_fast"] = out[0]["seconds"] / row["seconds"]
        bound = 1e-4 if device.type == "cpu" else 1e-2  # float32, bf16
        for name in ("loss", "gradient_norm"):
            off = abs(row[name] / out[0][name] - 1)
            gpu.require(off <= bound, f"{name}, {skew}, {how}, {way}: {row[name]}, off by {off}")
        several.say(row)
    return out


def step(model: Any, packs: list[Any], together: dict[str, Any] | None) -> tuple[float, int]:
    """This rank's loss, and the patches that its tower ran."""
    model.zero_grad(set_to_none=True)
    with attach(model):
        if together is None:
            loss = run(model, packs)
            return loss, sum(p.stats["patches_encoded"] for p in packs)
        with encode_together(model, packs, **together) as features:
            loss = run(model, packs, features=features)
        return loss, features.patches[distributed.get_rank(together["group"])]


def run(model: Any, packs: list[Any], **given: Any) -> float:
    """Forward and backward of each; gradients are reduced after the last."""
    total = torch.zeros((), device=packs[0].device)
    for pack in packs:
        reduced = pack is packs[-1]
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = reduced
        else:
            model.set_requires_gradient_sync(reduced)
        # by ids: the same in any pack
        share = torch.cos(pack.loss_targets.float())
        loss = (packed_logprobs(model, pack, **given) * share).sum() / 100
        loss.backward()
        total += loss.detach()
    return float(total)


def spread(name: str, own: int, group: Any, device: torch.device) -> dict[str, float]:
    """The most of all ranks, and their mean."""
    most = reduced(own, group, device, distributed.ReduceOp.MAX)
    mean = summed(own, group, device) / distributed.get_world_size(group)
    return {f"{name}_most": int(most), f"{name}_mean": int(mean)}


def summed(own: float, group: Any, device: torch.device) -> float:
    return reduced(own, group, device, distributed.ReduceOp.SUM)


def reduced(own: float, group: Any, device: torch.device, how: Any) -> float:
    value = torch.tensor(own, dtype=torch.float64, device=device)
    distributed.all_reduce(value, how, group=group)
    return float(value)


def norm(model: Any, group: Any) -> float:
    """Of all gradients; of the mean over ranks."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    whole = [g for g in found if not hasattr(g, "to_local")]
    parts = [g.to_local() for g in found if hasattr(g, "to_local")]
    square: Callable[[Any], float] = lambda gs: sum(float(g.double().square().sum()) for g in gs)  # noqa: E731
    device = next(model.parameters()).device
    return (square(whole) + summed(square(parts), group, device)) ** 0.5


if __name__ == "__main__":
    main()
