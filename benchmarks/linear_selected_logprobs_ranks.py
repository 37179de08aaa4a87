"""Fused linear selected logprob with the vocabulary split over GPUs of one host (NCCL): times by number of ranks.

    python benchmarks/linear_selected_logprobs_ranks.py
    python benchmarks/linear_selected_logprobs_ranks.py --tiny --ranks 2   # on a CPU, by gloo: only what is checked

Each rank holds hidden states of all N rows and its shard of the weight. Times are the slowest rank's; `speed_up` is
over one rank of the same run. Values are checked to be one rank's: on GPUs bit for bit, on a CPU within the contract.
Everything is bf16, on a CPU float32.
"""

from __future__ import annotations

from typing import Any

import gpu
import several
import torch
from torch import distributed

from mmpack.contracts import linear_logprob_bound
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs

NAME = "linear_selected_logprobs_ranks"
SHAPE = 13_107, 3584, 151_552  # rows, width, vocabulary: whole tiles on four ranks
TINY = 60, 64, 1024
BUDGETS = {"recompute": None, "stored": 1 << 40}
REPEATS = 11


def main() -> None:
    options = gpu.arguments(
        NAME,
        ranks={"type": int, "help": "processes; as many as there are GPUs unless given"},
        tiny={"action": "store_true", "help": "few rows of a small head"},
    )
    several.measured(NAME, measure, options)


def measure(device: torch.device, options: Any) -> several.Rows:
    count, width, vocab = TINY if options.tiny else SHAPE
    rank, dtype = distributed.get_rank(), torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    hidden = torch.randn(count, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, device=device).mul_(0.05).to(dtype)
    targets = torch.randint(0, vocab, (count,), device=device)
    up = torch.randn(count, device=device) / count
    for x in (hidden.data, weight, targets, up):
        distributed.broadcast(x, 0)
    alone = linear_selected_logprobs(hidden.detach(), weight, targets)
    bound = 0.0
    if device.type == "cpu":
        bound = linear_logprob_bound(float((hidden @ weight.T).detach().abs().max()))
    rows: several.Rows = []
    for size, group in several.groups().items():
        if rank >= size:
            continue
        shard = weight[rank * vocab // size : (rank + 1) * vocab // size].clone().requires_grad_()
        for name, budget in BUDGETS.items():

            def step(shard=shard, budget=budget, group=group) -> torch.Tensor:
                hidden.grad = shard.grad = None
                lp, _ = linear_selected_logprobs(
                    hidden, shard, targets, entropy=True, memory_budget=budget, group=group
                )
                lp.backward(up)
                return lp.detach()

            off = float((step() - alone).abs().max())
            gpu.require(off <= bound, f"values on {size} ranks, off by {off}")
            taken = several.seconds(step, REPEATS, device, group)
            row = {"name": f"mmpack {name}", "ranks": size, "N": count, "H": width, "V": vocab}
            one = next((r["both_ms"] for r in rows if r["name"] == row["name"]), 1e3 * taken)
            rows.append(row | {"both_ms": 1e3 * taken, "speed_up": one / (1e3 * taken)})
            several.say(rows[-1])
    return rows


if __name__ == "__main__":
    main()
