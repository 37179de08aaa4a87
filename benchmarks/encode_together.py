"""A step whose pictures lie on one rank: each rank encodes its own, or all encode them together.

Each rank has two packs of text; the packs of rank 0 have pictures, too. Seconds of a step, forward and backward, of the
slowest rank (median), and the patches that each rank encodes. Before, losses of both ways must agree.

    torchrun --nproc-per-node 2 benchmarks/encode_together.py [--device cuda] [--model small|3b|7b] [--out FILE.json]

On a CPU (gloo) with a small model, on GPUs with NCCL. The model is in DistributedDataParallel, or sharded by FSDP2
(`--shard`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from features import FAMILY, MODELS, build
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, encode_together, in_step, packed_logprobs
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    model = wrapped(build(args.model, device), args.shard, device)
    packs = packs_of(args.model, rank, args.pictures, device)
    step = in_step(model, packs)
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "apart": lambda: apart(model, step.packs),
        "together": lambda: together(model, step.packs),
    }
    rows = {name: measured(run, args.repeats, device) for name, run in ways.items()}
    losses = [row["loss"] for row in rows.values()]
    if abs(losses[0] - losses[1]) > 1e-2 * max(1.0, abs(losses[0])):
        raise SystemExit(f"encode_together: the losses are {losses}, and must agree")
    report = {
        "benchmark": "encode_together",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": f"{FAMILY.name}, {args.model}",
        "ranks": ranks,
        "how": "FSDP2" if args.shard else "DistributedDataParallel",
        "rows": rows,
        "ratio": rows["apart"]["seconds"] / rows["together"]["seconds"],
    }
    if rank == 0:
        text = json.dumps(report, indent=1)
        print(text)
        if args.out:
            args.out.write_text(text + "\n")
    distributed.destroy_process_group()


def wrapped(model: Any, shard: bool, device: torch.device) -> Any:
    if not shard:
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for unit in (*decoder_layers(model), *tower_blocks(model), model):
        fully_shard(unit, mesh=mesh)
    return model


def packs_of(name: str, rank: int, pictures: int, device: torch.device) -> list[mp.PackedBatch]:
    """Two packs; rank 0's have `pictures` in all, one a sample."""
    out = []
    for half in range(2):
        count = pictures // 2
        samples = [sample_of(name, f"r{rank}/{half}/{k}", picture=rank == 0) for k in range(count)]
        out.append(mp.pack(samples).to(device))
    return out


def sample_of(name: str, sample: str, picture: bool) -> Sample:
    """A prompt, with a picture of its own or without, and a response; ids and pixels are drawn."""
    side, prompt, response = MODELS[name][1]
    rng = np.random.default_rng(list(sample.encode()))
    ids, media, spans = [], [], []
    if picture:
        content, grid = sha256(sample.encode()).hexdigest(), (1, side, side)
        medium = Medium(
            media_id=sample,
            modality="image",
            cache_key=cache_key(content, grid, {}),
            grid_thw=grid,
            num_tokens=FAMILY.vision_tokens(grid),
            content_hash=content,
            size=(side * FAMILY.patch_size,) * 2,
        )
        pixels = rng.standard_normal((side * side, FAMILY.patch_dim), dtype=np.float32)
        medium.pixel_values = torch.from_numpy(pixels)
        ids = [FAMILY.vision_start_id, *[FAMILY.image_token_id] * medium.num_tokens]
        ids.append(FAMILY.vision_end_id)
        media, spans = [medium], [ModalitySpan(1, 1 + medium.num_tokens, "image", 0)]
    ids += rng.integers(0, 150_000, prompt).tolist()
    loss = [LossSpan(len(ids), len(ids) + response, "response")]
    ids += rng.integers(0, 150_000, response).tolist()
    return Sample(sample, sample, FAMILY.name, np.array(ids), media, spans, loss)


def loss_of(model: Any, pack: Any, **kwargs: Any) -> torch.Tensor:
    return packed_logprobs(model, pack, **kwargs).sum() / 100


def apart(model: Any, packs: list[Any]) -> tuple[float, int]:
    """Each rank encodes what its packs have. Its loss, and the patches that its tower ran."""
    total, ran = 0.0, 0
    with attach(model):
        for pack in packs:
            loss = loss_of(model, pack)
            loss.backward()
            total += float(loss.detach())
            ran += pack.stats["patches_encoded"]
    return total, ran


def together(model: Any, packs: list[Any]) -> tuple[float, int]:
    total = 0.0
    with attach(model), encode_together(model, packs) as features:
        for pack in packs:
            loss = loss_of(model, pack, features=features)
            loss.backward()
            total += float(loss.detach())
    return total, features.patches[distributed.get_rank()]


def measured(
    run: Callable[[], tuple[float, int]], repeats: int, device: torch.device
) -> dict[str, Any]:
    """Median seconds of the slowest rank, the loss of all ranks, patches of each rank."""
    seconds = []
    for turn in range(repeats + 1):  # the first one warms up
        distributed.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss, patches = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = torch.tensor(time.perf_counter() - start, device=device)
        distributed.all_reduce(took, distributed.ReduceOp.MAX)
        if turn:
            seconds.append(float(took))
    total = torch.tensor(loss, device=device)
    distributed.all_reduce(total)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, patches)
    return {"seconds": statistics.median(seconds), "loss": float(total), "patches": found}


if __name__ == "__main__":
    main()
