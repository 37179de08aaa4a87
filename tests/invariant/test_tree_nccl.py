"""Products over ranks on GPUs, by NCCL: bf16, the same bits on 1, 2 and 4 ranks, as many as there are."""

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack import invariant

pytestmark = pytest.mark.gpu
K, INNER, N = 3584, 4736, 3584  # an MLP a quarter as wide as Qwen2.5-VL-7B's


def mlp(rank, ranks, group):
    torch.manual_seed(0)
    device = f"cuda:{rank}"
    # drawn on the CPU: the same on each rank
    x, up = torch.randn(2, 300, K)
    first, second = torch.randn(INNER, K) * K**-0.5, torch.randn(N, INNER) * INNER**-0.5
    own = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
    leaves = [
        t.to(device, torch.bfloat16).requires_grad_() for t in (x, first[own], second[:, own])
    ]
    inner = invariant.column_parallel(leaves[0], leaves[1], group=group)
    out = invariant.row_parallel(torch.nn.functional.silu(inner), leaves[2], group=group)
    out.backward(up.to(device, torch.bfloat16))
    return out.detach().cpu(), leaves[0].grad.cpu()


def run(rank, ranks, folder):
    found = mlp(rank, ranks, distributed.group.WORLD)
    wanted = torch.load(f"{folder}/one.pt")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_give_the_bits_of_one_gpu(tmp_path, ranks):
    torch.save(mlp(0, 1, None), tmp_path / "one.pt")
    spawned(run, ranks, tmp_path, str(tmp_path), on="cuda")
