"""Families with their rows over two ranks; and heads that three ranks don't divide."""

import pytest
import torch
from support.families import mixed_batch
from support.float64 import exact, separate
from support.heard import HEARING, some_samples
from support.models import logprobs_and_gradients, small_model
from support.sequence import (
    assert_same,
    model_with_heads,
    split_logprobs_and_gradients,
)
from support.unlike_ranks import spawned
from torch import distributed

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, record_routes
from mmpack.smoke.kits import get_kit

pytestmark = pytest.mark.slow
# experts, linear attention, tiles, windows with two-way blocks, latent attention, sound
KINDS = ["qwen3_vl_moe", "qwen3_5", "internvl", "gemma4", "kimi_k25", "qwen2_5_omni"]


def test_families_on_two_ranks(tmp_path):
    """Text, pictures, a video, sound; some samples share a prompt."""
    spawned(check_families, 2, tmp_path, [name for name in KINDS if get_kit(name).available])


def check_families(rank, ranks, names):
    for name in names:
        samples = some_samples(name) if name in HEARING else mixed_batch(name)
        check(small_model(name), samples, name)
    if "qwen3_vl_moe" in names:
        check_routes(small_model("qwen3_vl_moe"), mixed_batch("qwen3_vl_moe"))


def check_routes(model, samples):
    """Experts that another forward took are replayed row by row."""
    batch = mp.pack(samples)
    with attach(model), torch.no_grad():
        with record_routes(model) as routes:
            packed_logprobs(model, mp.pack(samples))
        batch.routed_experts = routes.rows.flip(0).contiguous()
        wanted = packed_logprobs(model, batch)
        found = packed_logprobs(model, batch, sequence_group=distributed.group.WORLD)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_heads_that_ranks_do_not_divide(tmp_path):
    spawned(check_heads, 3, tmp_path)


def check_heads(rank, ranks):
    """Four key heads are repeated for three ranks."""
    check(model_with_heads("qwen3_vl", 12, 4), mixed_batch("qwen3_vl"), ranks)


def check(model, samples, where):
    batch = mp.pack(samples, share_prefix=True)
    with attach(model):
        wanted = logprobs_and_gradients(model, batch)
        found = split_logprobs_and_gradients(model, batch, distributed.group.WORLD)
    assert_same(
        found, wanted, where, lambda: (separate(model, samples)[1], exact(model, samples)[1])
    )
