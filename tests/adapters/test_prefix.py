"""prefix_logprobs: a sequence with and without its cached prefix, beside packed_logprobs and transformers' forward."""

import dataclasses

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.models import small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    kv_bytes_per_token,
    packed_logprobs,
    prefix_logprobs,
    version_of,
)
from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector
from mmpack.cache import FeatureStore, PrefixIndex, RowStore
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, ModelError

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
@pytest.mark.parametrize(
    "block_size", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
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
    assert taken[0] == 0 == index.stats.left_out and (taken[1] > 0 or block_size == 16)
    assert sum(taken) > 0
    assert kv.bytes_per_row == index.bytes_per_token


def test_beside_transformers_own_forward(model):
    """Logits of the model as it is, no packing anywhere."""
    from mmpack.adapters.transformers import model_inputs

    sample = mixed_batch(model.config.model_type)[0]
    index, kv = caches(model)
    prefix_logprobs(model, sample, index, kv)
    found = prefix_logprobs(model, sample, index, kv, temperature=0.7)
    assert found.cached_tokens > 0
    with torch.no_grad():
        inputs = model_inputs(mp.pad([sample]), model)
        logits = model(**inputs).logits[0].double() / 0.7
    logprobs = logits.log_softmax(-1)
    expected = [logprobs[i - 1, sample.input_ids[i]].item() for i in sample.loss_indices]
    assert close(found.logprobs.double(), torch.tensor(expected, dtype=torch.float64))


def test_the_cut_goes_through_a_picture(qwen):
    parts = [
        ("text", [1, 2]),
        ("image", (1, 8, 8), "big"),
        ("text", [3, 4]),
        ("response", [5, 6, 7]),
    ]
    a, b = with_pixels(
        [make_sample(parts, "a"), make_sample([*parts[:-1], ("response", [9])], "b")]
    )
    start = a.modality_spans[0].start
    for limit in range(start, a.modality_spans[0].stop + 1):
        index, kv = caches(qwen, block_size=1)
        prefix_logprobs(qwen, a, index, kv)
        held = index.hold
        index.hold = lambda keys, limit=limit, held=held, most=limit: held(keys, min(limit, most))
        found = prefix_logprobs(qwen, b, index, kv)
        assert found.cached_tokens == limit
        assert close(found.logprobs, whole(qwen, b)), limit


def test_the_cache_is_what_is_read(qwen):
    """KV of another row, or of another picture, would show."""
    sample = mixed_batch("qwen2_5_vl")[0]
    index, kv = caches(qwen)
    prefix_logprobs(qwen, sample, index, kv)
    expected = whole(qwen, sample)
    for tensor in kv.tensors:
        kept = tensor.clone()
        tensor[2], tensor[9] = kept[9].clone(), kept[2].clone()
        assert not close(prefix_logprobs(qwen, sample, index, kv).logprobs, expected)
        tensor.copy_(kept)
    assert close(prefix_logprobs(qwen, sample, index, kv).logprobs, expected)


# -- never a wrong hit -------------------------------------------------------------------------------------------------


def test_equal_ids_with_another_picture(model):
    def asked(name):
        family = model.config.model_type
        grid = (1, 4, 4)
        parts = [
            ("text", range(9)),
            ("image", grid, name),
            ("text", range(8)),
            ("response", [5, 6]),
        ]
        return with_pixels([make_sample(parts, name, family=family)])[0]

    index, kv = caches(model)
    a, b = asked("one"), asked("two")
    for sample in (a, b):
        found = prefix_logprobs(model, sample, index, kv)
        assert close(found.logprobs, whole(model, sample))
    start = a.modality_spans[0].start
    assert found.cached_tokens == start // 4 * 4
    assert not close(whole(model, a), whole(model, b))


def test_stale_weights_are_never_hit(qwen):
    sample = mixed_batch("qwen2_5_vl")[0]
    index, kv = caches(qwen, features=0)
    first = prefix_logprobs(qwen, sample, index, kv)
    weight = qwen.model.get_decoder().layers[0].mlp.up_proj.weight
    kept = weight.clone()
    try:
        weight.data.mul_(1.5)  # no counter of torch's sees it
        again = prefix_logprobs(qwen, sample, index, kv)
        assert again.cached_tokens == 0 and close(again.logprobs, whole(qwen, sample))
        assert not close(again.logprobs, first.logprobs)
    finally:
        weight.data.copy_(kept)
    back = prefix_logprobs(qwen, sample, index, kv)
    assert back.cached_tokens > 0 and close(back.logprobs, first.logprobs)


def test_another_adapter_is_never_hit(qwen):
    peft = pytest.importorskip("peft")
    import copy

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
    first = version_of(qwen)
    assert version_of(qwen) == first
    with torch.autocast("cpu", torch.bfloat16):
        assert version_of(qwen) != first
    layer = qwen.model.get_decoder().layers[0]
    names = {first}
    for k in range(3):  # hooks that may get the same address one after the other
        handle = layer.register_forward_hook(lambda m, a, out, k=k: out)
        names.add(version_of(qwen))
        handle.remove()
        del handle
    assert len(names) == 4 and version_of(qwen) == first
    qwen.train()
    try:
        assert version_of(qwen)  # no dropout in it
    finally:
        qwen.eval()


# -- budgets, features -------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_a_small_budget_gives_the_same(qwen, blocks):
    index, kv = caches(qwen, blocks=blocks)
    samples = mixed_batch("qwen2_5_vl")
    for sample in [*samples, *samples[::-1]]:
        assert close(prefix_logprobs(qwen, sample, index, kv).logprobs, whole(qwen, sample))
    assert index.stats.evicted > 0 and len(index) <= blocks and kv.rows == blocks * 4


def test_media_are_those_of_the_steps_feature_store(model):
    """What a packed pass encoded is not encoded again; what is found in the store is the tower's."""
    sample = mixed_batch(model.config.model_type)[0]
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


def caches_of(index):
    """An empty index beside the same feature store."""
    other = PrefixIndex(
        index.max_bytes,
        bytes_per_token=index.bytes_per_token,
        block_size=4,
        features=index.features,
    )
    return other, RowStore(other.num_rows)


def test_layers_that_share_their_kv_are_held_once():
    """Gemma 3n: the last layers read keys and values of earlier ones; bytes and tensors are of those that have some."""
    from transformers import DynamicCache, Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        laurel_rank=4,
        altup_num_inputs=2,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    text = Gemma3nTextModel(config).eval()
    ids = torch.arange(20)[None] % 64
    with torch.no_grad():
        cache = DynamicCache()
        expected = text(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        layers = [x for x in cache.layers if x.keys is not None and x.keys.numel()]
        assert len(layers) == 2
        rows = [t[0].transpose(0, 1) for x in layers for t in (x.keys, x.values)]
        index = PrefixIndex(2**20, bytes_per_token=sum(r[0].nbytes for r in rows), block_size=4)
        kv = RowStore(index.num_rows)
        sample = make_sample([("text", ids[0].tolist())], family="qwen2_5_vl")
        keys = index.keys(sample, weights="w")
        with index.reserve(keys) as new:
            kv.write(new.rows, [r[new.start : new.stop] for r in rows])
        with index.hold(keys, limit=17) as hit:
            again = DynamicCache()
            held = [x.transpose(0, 1)[None] for x in kv.read(hit.rows)]
            for k in range(2):
                again.update(held[2 * k], held[2 * k + 1], k)
        assert hit.tokens == 16 and kv.bytes_per_row == index.bytes_per_token
        found = text(input_ids=ids[:, 16:], past_key_values=again, use_cache=True).last_hidden_state
    assert torch.allclose(found, expected[:, 16:], atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_named(qwen):
    sample = mixed_batch("qwen2_5_vl")[0]
    index, kv = caches(qwen)
    with attach(qwen), pytest.raises(ModelError, match=r"is attached.*Fix: call detach"):
        prefix_logprobs(qwen, sample, index, kv)
    for args, said in (
        ((sample, index, RowStore(3)), "the store has 3 rows"),
        (([sample], index, kv), "sample is of type list"),
        ((sample, kv, index), "index is of type RowStore"),
    ):
        with pytest.raises(ArgumentError, match=rf"prefix_logprobs: {said}.*Fix: "):
            prefix_logprobs(qwen, *args)
    with pytest.raises(ArgumentError, match="temperature is 0"):
        prefix_logprobs(qwen, sample, index, kv, temperature=0)
    small = PrefixIndex(10**5, bytes_per_token=16)
    with pytest.raises(ArgumentError, match=r"KV takes \d+ bytes, the index counts 16"):
        prefix_logprobs(qwen, sample, small, RowStore(small.num_rows))
    assert len(small) == 0  # what failed is not found
    qwen.model.get_decoder().layers[0].self_attn.add_module("drop", torch.nn.Dropout(0.5).train())
    try:
        with pytest.raises(ModelError, match="random"):
            prefix_logprobs(qwen, sample, index, kv)
    finally:
        del qwen.model.get_decoder().layers[0].self_attn.drop


def test_samples_without_loss_tokens_fill_the_cache(qwen):
    text = make_sample([("text", np.arange(30))])
    index, kv = caches(qwen)
    found = prefix_logprobs(qwen, text, index, kv)
    assert found.logprobs.shape == (0,) and found.added_tokens == 28
    longer = make_sample([("text", np.arange(30)), ("response", [3, 4])])
    found = prefix_logprobs(qwen, longer, index, kv)
    assert found.cached_tokens == 28 and close(found.logprobs, whole(qwen, longer))
