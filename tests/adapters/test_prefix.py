"""prefix_logprobs: a sequence with and without its cached prefix, beside packed_logprobs and transformers' forward."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.models import small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, prefix_logprobs
from mmpack.adapters.transformers.prefix import kv_bytes_per_token, version_of
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.cache import FeatureStore, PrefixIndex, RowStore
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, ModelError
from mmpack.versions import takes_encoded_media

pytestmark = pytest.mark.adapter
CLOSE = TOLERANCES["layouts"].value
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "internvl"]
models = {}


@pytest.fixture(params=FAMILIES)
def model(request):
    return the(request.param)


@pytest.fixture
def qwen():
    return the("qwen2_5_vl")


def the(family):
    if family not in models:
        model = models[family] = small_model(family).requires_grad_(False)
        if takes_encoded_media(model):  # some modules note things in their first forward
            prefix_logprobs(model, mixed_batch(family)[0], *caches(model))
    if not takes_encoded_media(models[family]):
        pytest.skip("this transformers takes no encoded media")
    return models[family]


def caches(model, blocks=400, block_size=4, features=2**24):
    store = FeatureStore(features) if features else None
    index = PrefixIndex(
        blocks * block_size * kv_bytes_per_token(model),
        bytes_per_token=kv_bytes_per_token(model),
        block_size=block_size,
        features=store,
    )
    return index, RowStore(index.num_rows)


@torch.no_grad()
def whole(model, sample, temperature=1.0):
    with attach(model):
        return packed_logprobs(model, mp.pack([sample]), temperature)


def close(found, expected):
    return float((found - expected).abs().max()) <= CLOSE


@pytest.mark.few(2)
@pytest.mark.parametrize("block_size", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_with_and_without_its_prefix(model, block_size):
    """Five samples of three prompts, twice: pictures lie in the prefix, in what follows, and across the cut."""
    samples = mixed_batch(model.config.model_type)
    index, kv = caches(model, block_size=block_size)
    taken = []
    for turn in range(2):
        for sample in samples:
            found = prefix_logprobs(model, sample, index, kv)
            assert close(found.logprobs, whole(model, sample)), (turn, sample.sample_id)
            taken.append(found.cached_tokens)
            first = sample.loss_spans[0].start
            if turn:  # all whole blocks before the row that is read first
                assert found.cached_tokens == (first - 1) // block_size * block_size
                assert found.added_tokens == found.patches_encoded == 0
    assert taken[0] == 0 == index.stats.left_out and taken[1] > 0
    assert kv.bytes_per_row == index.bytes_per_token


def test_the_cut_goes_through_a_picture(qwen):
    parts = [("text", [1, 2]), ("image", (1, 8, 8), "big"), ("text", [3, 4])]
    a, b = with_pixels(
        [
            make_sample([*parts, ("response", ids)], name)
            for ids, name in (([5, 6, 7], "a"), ([9], "b"))
        ]
    )
    start = a.modality_spans[0].start
    for limit in (start, start + 1, start + 7, a.modality_spans[0].stop):
        index, kv = caches(qwen, block_size=1)
        prefix_logprobs(qwen, a, index, kv)
        held = index.hold
        index.hold = lambda keys, limit=limit, held=held, most=limit: held(keys, min(limit, most))
        found = prefix_logprobs(qwen, b, index, kv)
        assert found.cached_tokens == limit
        assert close(found.logprobs, whole(qwen, b)), limit


# -- never a wrong hit -------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
def test_equal_ids_with_another_picture(model):
    def asked(name):
        parts = [("text", range(9)), ("image", (1, 4, 4), name), ("text", range(8))]
        family = model.config.model_type
        return with_pixels([make_sample([*parts, ("response", [5, 6])], name, family=family)])[0]

    index, kv = caches(model)
    a, b = asked("one"), asked("two")
    for sample in (a, b):
        found = prefix_logprobs(model, sample, index, kv)
        assert close(found.logprobs, whole(model, sample))
    start = a.modality_spans[0].start
    assert found.cached_tokens == start // 4 * 4
    assert not close(whole(model, a), whole(model, b))


def test_stale_weights_are_never_hit():
    model, sample = small_model("qwen2_5_vl"), mixed_batch("qwen2_5_vl")[0]
    if not takes_encoded_media(model):
        pytest.skip("this transformers takes no encoded media")
    index, kv = caches(model, features=0)
    first = prefix_logprobs(model, sample, index, kv)
    weight = model.model.get_decoder().layers[0].mlp.up_proj.weight
    for factor, cached in ((2, False), (0.5, True)):  # taken back, it is the first version again
        weight.data.mul_(factor)  # no counter of torch's sees it
        found = prefix_logprobs(model, sample, index, kv)
        assert (found.cached_tokens > 0) == cached == close(found.logprobs, first.logprobs)
        assert close(found.logprobs, whole(model, sample))


def test_another_adapter_is_never_hit(qwen):
    peft = pytest.importorskip("peft")

    sample = mixed_batch("qwen2_5_vl")[0]
    wrapped = peft.get_peft_model(
        copy.deepcopy(qwen), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    ).eval()
    for name, p in wrapped.named_parameters():
        if "lora_B" in name and "visual" not in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    index, kv = caches(qwen, features=0)
    on = prefix_logprobs(wrapped, sample, index, kv)
    with wrapped.disable_adapter():
        off = prefix_logprobs(wrapped, sample, index, kv)
        assert off.cached_tokens == 0 and close(off.logprobs, whole(qwen, sample))
        assert prefix_logprobs(wrapped, sample, index, kv).cached_tokens > 0
    assert not close(on.logprobs, off.logprobs)
    again = prefix_logprobs(wrapped, sample, index, kv)
    assert again.cached_tokens > 0 and close(again.logprobs, on.logprobs)
    assert prefix_logprobs(wrapped, sample, index, kv, adapter="b").cached_tokens == 0


def test_a_version_is_of_what_is_computed(qwen):
    first, layer = version_of(qwen), qwen.model.get_decoder().layers[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert version_of(qwen) != first
    names = {first}
    for k in range(3):  # hooks that may get the same address one after the other
        handle = layer.register_forward_hook(lambda m, a, out, k=k: out)
        names.add(version_of(qwen))
        handle.remove()
    assert len(names) == 4 and version_of(qwen) == first


# -- budgets, features -------------------------------------------------------------------------------------------------


def test_a_small_budget_gives_the_same(qwen):
    blocks = 3
    index, kv = caches(qwen, blocks=blocks)
    samples = mixed_batch("qwen2_5_vl")
    for sample in [*samples, *samples[::-1]]:
        assert close(prefix_logprobs(qwen, sample, index, kv).logprobs, whole(qwen, sample))
    assert index.stats.evicted > 0 and len(index) <= blocks and kv.rows == blocks * 4


def test_media_are_those_of_the_steps_feature_store(qwen):
    """What a packed pass encoded is not encoded again; what is found in the store is the tower's."""
    model, sample = qwen, mixed_batch("qwen2_5_vl")[0]
    index, kv = caches(model)
    store = index.features
    with attach(model), torch.no_grad():
        packed_logprobs(model, mp.pack([sample]), features=store)
        tower = tower_and_projector(model)
    encoded = store.stats.patches_encoded
    assert encoded == sum(m.num_patches for m in sample.media)
    version = version_of(model)
    with attach(model, text=False):
        assert version_of(model) == version
    assert prefix_logprobs(model, sample, index, kv).patches_encoded == 0
    assert store.stats.patches_encoded == encoded
    before = dataclasses.replace(store.stats)
    hit = index.lookup(index.keys(sample, weights=version))
    with attach(model, text=False):
        held = index.features_of(hit, tower)
    assert store.stats == before and len(held) == len(hit.media) == len(sample.media)
    for name, levels in zip(hit.media, held, strict=True):
        medium = next(m for m in sample.media if name.startswith(m.cache_key))
        assert [len(level) for level in levels] == [medium.num_tokens] * len(levels)
    index.features = FeatureStore(2**24)
    assert index.features_of(hit, tower) == [None] * len(hit.media)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_named(qwen):
    sample = mixed_batch("qwen2_5_vl")[0]
    index, kv = caches(qwen)
    small = PrefixIndex(10**5, bytes_per_token=16)
    with attach(qwen), pytest.raises(ModelError, match=r"is attached.*Fix: call detach"):
        prefix_logprobs(qwen, sample, index, kv)
    for args, temperature, said in (
        ((sample, index, RowStore(3)), 1, "the store has 3 rows"),
        (([sample], index, kv), 1, "sample is of type list"),
        ((sample, kv, index), 1, "index is of type RowStore"),
        ((sample, index, kv), 0, "temperature is 0"),
        ((sample, small, RowStore(small.num_rows)), 1, r"a token's KV takes \d+ bytes, the index"),
    ):
        with pytest.raises(ArgumentError, match=rf"prefix_logprobs: {said}.*Fix: "):
            prefix_logprobs(qwen, *args, temperature=temperature)
    assert len(small) == 0  # what failed is not found
    attention = qwen.model.get_decoder().layers[0].self_attn
    attention.add_module("drop", torch.nn.Dropout(0.5).train())
    with pytest.raises(ModelError, match="random"):
        prefix_logprobs(qwen, sample, index, kv)
    del attention.drop


def test_samples_without_loss_tokens_fill_the_cache(qwen):
    text = make_sample([("text", np.arange(30))])
    index, kv = caches(qwen)
    found = prefix_logprobs(qwen, text, index, kv)
    assert found.logprobs.shape == (0,) and found.added_tokens == 28
    longer = make_sample([("text", np.arange(30)), ("response", [3, 4])])
    found = prefix_logprobs(qwen, longer, index, kv)
    assert found.cached_tokens == 28 and close(found.logprobs, whole(qwen, longer))
