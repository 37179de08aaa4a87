"""Families with their rows over two ranks; and heads that three ranks don't divide."""

import copy

import pytest
import torch
from support.families import mixed_batch
from support.float64 import exact, separate
from support.heard import HEARING, some_samples
from support.kits import get_kit
from support.models import logprobs_and_gradients, small_model
from support.ranks import here, logprob_bound, spawned
from support.sequence import (
    assert_same,
    model_with_heads,
    split_logprobs_and_gradients,
)
from torch import distributed

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, record_routes

pytestmark = pytest.mark.slow
# experts, linear attention, tiles, windows with two-way blocks, latent attention, sound
KINDS = ["qwen3_vl_moe", "qwen3_5", "internvl", "gemma4", "kimi_k25", "qwen2_5_omni"]


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_families_on_two_ranks(tmp_path, on):
    """Text, pictures, a video, sound; some samples share a prompt."""
    names = [name for name in KINDS if get_kit(name).available]
    if on == "cuda":  # linear attention there rounds to TF32
        names.remove("qwen3_5")
    spawned(check_families, 2, tmp_path, names, on=on)


def check_families(rank, ranks, names):
    for name in names:
        samples = some_samples(name) if name in HEARING else mixed_batch(name)
        check(small_model(name).to(here()), samples, name)
    if "qwen3_vl_moe" in names:
        check_routes(small_model("qwen3_vl_moe").to(here()), mixed_batch("qwen3_vl_moe"))


def check_routes(model, samples):
    """Experts that another forward took are replayed row by row."""
    batch = mp.pack(samples).to(here())
    with attach(model), torch.no_grad():
        with record_routes(model) as routes:
            packed_logprobs(model, mp.pack(samples).to(here()))
        batch.routed_experts = routes.rows.flip(0).contiguous()
        wanted = packed_logprobs(model, batch)
        found = packed_logprobs(model, batch, sequence_group=distributed.group.WORLD)
    torch.testing.assert_close(found, wanted, rtol=0, atol=logprob_bound())


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_heads_that_ranks_do_not_divide(tmp_path, on):
    spawned(check_heads, 3, tmp_path, on=on)


def check_heads(rank, ranks):
    """Four key heads are repeated for three ranks."""
    check(model_with_heads("qwen3_vl", 12, 4).to(here()), mixed_batch("qwen3_vl"), ranks)


def check(model, samples, where):
    batch = mp.pack(samples, share_prefix=True).to(here())
    with attach(model):
        wanted = logprobs_and_gradients(model, batch)
        found = split_logprobs_and_gradients(model, batch, distributed.group.WORLD)
    host = copy.deepcopy(model).cpu()
    assert_same(found, wanted, where, lambda: (separate(host, samples)[1], exact(host, samples)[1]))
