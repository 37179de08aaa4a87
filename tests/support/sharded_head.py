"""A small model that ends in mmpack's head, and one training step of it: whole, and under FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs

ROWS, WIDTH, VOCAB = 64, 48, 512


class Head(nn.Module):
    """ids [T] -> logprobs [N] of `targets` at `rows`; the output weight is read in the module's own forward."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)

    def forward(self, ids: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        hidden = self.body(self.embed(ids)).tanh()
        return linear_selected_logprobs(hidden, self.lm_head.weight, targets, rows)


def head_problem(device: torch.device, dtype: torch.dtype, ranks: int) -> list[tuple[Tensor, ...]]:
    """For each rank: ids, targets, rows, and the gradient of its logprobs."""
    torch.manual_seed(1)
    parts = []
    for _ in range(ranks):
        ids, targets = torch.randint(0, VOCAB, (2, ROWS))
        parts.append((ids, targets, torch.randperm(ROWS), torch.randn(ROWS)))
    return [tuple(x.to(device) for x in part) for part in parts]


def train_step(model: Head, problem: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Gradients of the mean over the ranks, as FSDP makes it."""
    for *inputs, up in problem:
        (model(*inputs) @ up / len(problem)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def train_step_sharded(
    model: Head, problem: list[tuple[Tensor, ...]], rank: int, ranks: int
) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(problem[0][0].device.type, (ranks,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    *inputs, up = problem[rank]
    (model(*inputs) @ up).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}
