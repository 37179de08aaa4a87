"""Ranks with pictures, a video, text alone, and fewer packs or samples: towers run where another rank's do."""

import pytest
import torch
from support.models import small_model
from support.ranks import assert_gradients, here, spawned
from support.unlike_ranks import frozen_words, samples_of, unlike_step, wrapped

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.adapters.transformers import attach, packed_logprobs

pytestmark = pytest.mark.slow  # `test_encode_together` has a quick one


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_three_ranks_are_one_process(tmp_path, family, on):
    spawned(unlike_step, 3, tmp_path, family, ("fsdp", "ddp", "frozen"), on=on)


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loader_of_more_ranks_than_samples(tmp_path, on):
    """The mean of the global batch, whatever rank has how many samples, or none."""
    spawned(loaded, 4, tmp_path, on=on)


def loss_of(model, batch, total_tokens, total_samples, scale=1.0):
    out = mp.policy_loss(
        packed_logprobs(model, batch),
        batch.loss_columns["advantages"],
        batch.cu_loss,
        total_tokens=total_tokens,
        total_samples=total_samples,
        scale=scale,
    )
    return out.loss


def loaded(rank, ranks):
    samples = [s for own in samples_of("qwen3_vl") for some in own for s in some][:5]
    columns = {"advantages": [0.5, -1.0, 2.0, 1.5, -0.5]}
    whole = frozen_words(small_model("qwen3_vl")).to(here())
    each = [
        torch.full((s.num_loss_tokens,), a)
        for s, a in zip(samples, columns["advantages"], strict=True)
    ]
    batch = mp.pack(samples, loss_columns={"advantages": each}).to(here())
    with attach(whole):
        expected = loss_of(whole, batch, batch.num_loss_tokens, len(samples))
        expected.backward()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    idle = torch.zeros((), device=here())
    for how in ("fsdp", "ddp"):
        model = wrapped("qwen3_vl", how, ranks)
        given = {"loss_columns": columns, "max_tokens": 200, "max_samples": 1}
        total = torch.zeros((), device=here())
        with PackLoader(samples, rank=rank, ranks=ranks, **given) as loader, attach(model):
            for step in loader:
                for batch in step:
                    batch = batch.to(here())
                    totals = step.total_tokens, step.total_samples
                    loss = loss_of(model, batch, *totals, scale=ranks)
                    loss.backward()  # under DDP each one is reduced
                    total += loss.detach() / ranks
                    idle += not batch.sample_ids
        torch.distributed.all_reduce(total)
        assert abs(total - expected.detach()) <= 1e-6, how
        assert_gradients(model, wanted, how)
    torch.distributed.all_reduce(idle)
    assert idle == 2 * 3
