"""Rewards and costs on a GPU: the same numbers as on the CPU, and a multiplier that NCCL ranks share."""

import pytest
import torch
from support.samples import make_sample
from torch import distributed

import mmpack as mp
from mmpack.losses.chunks import action_chunks
from mmpack.losses.constrained import (
    PID,
    Costs,
    LagrangeMultiplier,
    Rewards,
    constrained_advantages,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def samples():
    out = []
    for i in range(6):
        parts = [("text", range(3)), ("response", range(4 + i), 0), ("response", range(2), 1)]
        sample = make_sample(parts, f"s{i}", f"g{i // 3}")
        sample.rewards = [mp.Score("paid", float(i % 4))]
        sample.costs = [
            mp.schema.Cost("harm", i / 8, {"turn": 0}),
            mp.schema.Cost("slow", float(i % 2)),
        ]
        out.append(sample)
    return out


def of_device(device):
    """Costs of tokens, advantages and the loss's gradient, back on the CPU."""
    given = samples()
    batch = mp.pack(given)
    chunks = action_chunks(batch).to(device)
    batch = batch.to(device)
    tokens = mp.losses.scatter_costs(batch, Costs.of(given).to(device), at="mean")
    paid = Rewards.of(given).to(device).advantages(batch.group_index, "rloo")
    charged = tokens.per_sample(batch.cu_loss).advantages(batch.group_index, "rloo")
    advantages = constrained_advantages(paid, charged, {"harm": 0.5, "slow": 2.0})
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(batch.num_loss_tokens, generator=generator)
    logprobs = logprobs.to(device).requires_grad_()
    by_chunk = chunks.spread(chunks.sum(logprobs).float())
    out = mp.policy_loss(logprobs, advantages, batch.cu_loss)
    (out.loss + by_chunk.sum()).backward()
    assert advantages.device.type == tokens.device.type == torch.device(device).type
    return tokens, advantages.cpu(), logprobs.grad.cpu()


def test_a_gpu_s_numbers_are_the_cpu_s():
    (here, *wanted), (there, *got) = of_device("cpu"), of_device("cuda")
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
    (sums, count), (wanted_sums, wanted_count) = there.sums(), here.sums()
    assert count == wanted_count and sums == pytest.approx(wanted_sums, abs=1e-5)


def test_nccl_gathers_costs(tmp_path):
    """One rank, which is what one GPU can hold: the gathering runs, and changes nothing."""
    if not distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        costs = Costs({"harm": torch.tensor([1.0, 0.25], device="cuda")})
        one, two = (LagrangeMultiplier({"harm": 0.1}, PID(0.3, 0.2, 0.1)) for _ in range(2))
        for _ in range(3):
            assert one.update(costs, distributed.group.WORLD) == two.update(costs)
    finally:
        distributed.destroy_process_group()
