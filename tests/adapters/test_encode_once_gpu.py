"""Kept features, one backward of the tower, and chunks on a GPU, in bf16: as encoding again in each pass."""

from contextlib import nullcontext

import pytest
import torch
from support.families import mixed_batch
from support.models import relative_difference, small_model, weights_of

import mmpack as mp
from mmpack.adapters.transformers import attach, encode_once, packed_logprobs
from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector
from mmpack.cache import FeatureStore

pytestmark = pytest.mark.gpu
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "internvl"]


def made(name, dtype):
    model = small_model(name, factor=2).to("cuda", dtype)
    if not takes_encoded_media(model):
        pytest.skip("transformers before 5.19")
    return model


def packs_of(name):
    samples = mixed_batch(name)
    parts = ((0, 1), (2, 3), (4,))
    return [mp.pack([samples[i] for i in part], share_prefix=True).to("cuda") for part in parts]


def gradients(model, packs, features=None, **kwargs):
    model.zero_grad(set_to_none=True)
    with encode_once(model, packs, **kwargs) if features else nullcontext() as made:
        given = {"features": made} if features else kwargs
        for pack in packs:
            (
                packed_logprobs(model, pack.to("cuda"), **given) * weights_of(pack).cuda()
            ).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_one_backward_is_one_in_each_micro_batch(name, dtype, bound, no_tf32):
    model, packs = made(name, dtype), packs_of(name)
    on_host = [p.to("cpu") for p in packs]  # pixels move when they are encoded
    with attach(model):
        wanted = gradients(model, packs)
        for given, kwargs in (
            (packs, {"features": True}),
            (packs, {"features": True, "max_patches": 24}),
            (packs, {"max_patches": 24}),
            (on_host, {"features": True}),
        ):
            assert relative_difference(gradients(model, given, **kwargs), wanted) <= bound


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("budgets", [(2**26, 0), (2**10, 2**26)])
def test_a_store_gives_the_bits_of_encoding_again(name, budgets):
    model, store = made(name, torch.bfloat16), FeatureStore(*budgets)
    batch = mp.pack(mixed_batch(name), share_prefix=True).to("cuda")
    for parameter in tower_and_projector(model).parameters():
        parameter.requires_grad_(False)
    with attach(model), torch.no_grad():
        wanted = packed_logprobs(model, batch)
        for _ in range(3):
            assert torch.equal(packed_logprobs(model, batch, features=store), wanted)
    assert store.stats.misses == len(batch.media) and store.stats.hits == 2 * len(batch.media)
    assert (store.stats.restored > 0) == (budgets[0] == 2**10)


def test_a_chunk_that_runs_again_draws_the_same_dropout():
    """Checkpointed as a whole, and layer by layer as transformers does: the same chunks, the same random numbers."""
    model, (batch, *_) = made("qwen2_5_vl", torch.float32).train(), packs_of("qwen2_5_vl")[1:]
    for block in model.model.visual.blocks:
        block.attn.attention_dropout = 0.5
    found = []
    for layers in (False, True):
        if layers:
            model.model.visual.gradient_checkpointing_enable({"use_reentrant": False})
        with attach(model):
            torch.manual_seed(0)
            found.append(gradients(model, [batch], max_patches=1))
    assert relative_difference(*found) <= 1e-4
    with attach(model):
        torch.manual_seed(1)
        assert relative_difference(gradients(model, [batch], max_patches=1), found[0]) > 1e-2
