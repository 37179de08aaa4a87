"""Fused linear selected logprob with the vocabulary split over GPUs of one host (NCCL): times by number of ranks.

    python benchmarks/linear_selected_logprobs_ranks.py

Each rank holds hidden states of all N rows and its shard of the weight. Times are the slowest rank's; `speed_up` is
over one rank of the same run. Values are checked to be one rank's, bit for bit. Everything is bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import distributed

from mmpack.ops.linear_logprobs.linear import linear_selected_logprobs

NAME = "linear_selected_logprobs_ranks"
COUNT, WIDTH, VOCAB = 13_107, 3584, 151_552  # whole tiles on four ranks
BUDGETS = {"recompute": None, "stored": 1 << 40}


def main() -> None:
    options = gpu.arguments(NAME)
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(measure, (ranks, folder, out), nprocs=ranks)
        rows = json.loads(out.read_text())
    floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
    gpu.write(options.out, NAME, floors, rows)


def measure(rank: int, ranks: int, folder: str, out: Path) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        device_id=device,
    )
    torch.manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, device=device).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, device=device).mul_(0.05).bfloat16()
    targets = torch.randint(0, VOCAB, (COUNT,), device=device)
    up = torch.randn(COUNT, device=device) / COUNT
    for x in (hidden.data, weight, targets, up):
        distributed.broadcast(x, 0)
    alone = linear_selected_logprobs(hidden.detach(), weight, targets)
    rows = []
    for size in (n for n in (1, 2, 4, 8) if n <= ranks):
        group = distributed.new_group(list(range(size)))
        if rank >= size:
            continue
        shard = weight[rank * VOCAB // size : (rank + 1) * VOCAB // size].clone().requires_grad_()
        for name, budget in BUDGETS.items():

            def step(shard=shard, budget=budget, group=group) -> torch.Tensor:
                hidden.grad = shard.grad = None
                lp, _ = linear_selected_logprobs(
                    hidden, shard, targets, entropy=True, memory_budget=budget, group=group
                )
                lp.backward(up)
                return lp.detach()

            gpu.require(torch.equal(step(), alone), f"equal bits on {size} ranks")
            distributed.barrier(group=group)
            taken = torch.tensor(gpu.milliseconds(step), device=device)
            distributed.all_reduce(taken, distributed.ReduceOp.MAX, group=group)
            rows.append(
                {"name": f"mmpack {name}", "ranks": size, "N": COUNT, "H": WIDTH, "V": VOCAB}
                | {"both_ms": float(taken)}
            )
    if rank == 0:
        one = {row["name"]: row["both_ms"] for row in rows if row["ranks"] == 1}
        for row in rows:
            row["speed_up"] = one[row["name"]] / row["both_ms"]
        out.write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
