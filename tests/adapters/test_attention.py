"""Attention "mmpack": packed, shared and padded rows give each sample what it gets by itself; wrong use raises."""

import copy
import pickle

import numpy as np
import pytest
import torch
from support.families import LAYOUTS
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.models import logprobs_and_gradients, relative_difference, spread_out, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, is_attached, model_inputs, packed_logprobs
from mmpack.adapters.transformers.attention import visible_attention
from mmpack.contracts import TOLERANCES
from mmpack.ops.attention import TREE, plan_attention

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def model():
    return spread_out(tiny_qwen2_5_vl())


@pytest.fixture
def attached(model):
    with attach(model):
        yield model


def batch_of(name):
    rng = np.random.default_rng(3)

    def text(n):
        return ("text", rng.integers(0, 151643, n))

    def response(n, turn=None):
        return ("response", rng.integers(0, 151643, n), turn)

    image, other, video = (
        ("image", (1, 4, 6), "x"),
        ("image", (1, 8, 4), "y"),
        ("video", (2, 4, 4), "f"),
    )
    prompt, end = [text(5), image, text(3)], response(4)
    parts = {
        "three responses": [[*prompt, response(n)] for n in (5, 3, 6)],
        "text": [[text(n), response(m)] for n, m in ((3, 4), (9, 1), (1, 6))],
        "mixed": [
            [text(4), response(3)],
            [*prompt, response(4)],
            [text(2), video, text(2), image, other, response(5)],
            [text(7)],
            [other, text(1), video, response(2)],
        ],
        "identical": [[*prompt, end]] * 3,
        "prefix": [[*prompt, end], [*prompt, end, text(3), response(2)], prompt],
        "tree": [
            [*prompt, end, text(2), other, response(3, 1)],
            [*prompt, end, text(2), response(2, 1)],
            [*prompt, response(2), video, response(2, 1)],
            [text(5), image, response(3)],
        ],
        "another image": [[*prompt, end], [prompt[0], ("image", (1, 4, 6), "z"), prompt[2], end]],
        "one sample": [[*prompt, end]],
    }[name]
    return with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])


@pytest.mark.parametrize(
    "name",
    ["tree", *(pytest.param(n, marks=pytest.mark.slow) for n in ("three responses", "mixed"))],
)
def test_values_and_gradients_are_those_of_each_sample_alone(model, name):
    samples = batch_of(name)
    wanted, gradients = exact(model, samples)
    alone, separately = separate(model, samples)
    assert (alone - wanted).abs().max() <= TOLERANCES["layouts"].value
    for layout in ("packed, rounded up", "shared", "left"):
        with attach(model):
            values, found = logprobs_and_gradients(model, LAYOUTS[layout](samples))
        assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value, layout
        assert_as_exact_as_separate(found, separately, gradients, layout)


@pytest.mark.parametrize("name", ["text", "identical", "prefix", "another image", "one sample"])
def test_values_are_those_of_each_sample_alone(model, name):
    samples = batch_of(name)
    with torch.no_grad():
        alone = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        padded = [packed_logprobs(model, LAYOUTS[side](samples)) for side in ("left", "right")]
        with attach(model):
            found = {k: packed_logprobs(model, make(samples)) for k, make in LAYOUTS.items()}
    found |= dict(zip(("left by mask", "right by mask"), padded, strict=True))
    for layout, values in found.items():
        assert (values - alone).abs().max() <= TOLERANCES["layouts"].value, layout


def test_the_tests_can_see_a_wrong_rule(attached):
    """A sample that sees its neighbour is off by far more than the bound."""
    samples = batch_of("three responses")
    batch = mp.pack(samples)
    with torch.no_grad():
        right = packed_logprobs(attached, batch)
        batch.visible_until[:] = len(batch.input_ids)
        with pytest.raises(mp.ArgumentError, match="was changed since"):
            packed_logprobs(attached, batch)
        with pytest.raises(mp.ArgumentError, match="was changed since"):
            batch.to("meta")
        padding = np.zeros(len(batch.input_ids), dtype=bool)
        batch.attention_plan = plan_attention(batch.visible_until.numpy(), padding)
        assert (packed_logprobs(attached, batch) - right).abs().max() > 1e-2


def test_dropout_of_the_config_counts_in_training_alone(attached, monkeypatch):
    text = attached.config.get_text_config()
    layers = [layer.self_attn for layer in attached.get_decoder().layers]
    batch = mp.pack(batch_of("three responses"), share_prefix=True)
    asked = []
    able = type(TREE).choices

    def choices(self, *operands):
        if self is TREE:
            asked.append(operands[3])  # dropout
        return able(self, *operands)

    monkeypatch.setattr(type(TREE), "choices", choices)
    with torch.no_grad():
        without = packed_logprobs(attached, batch)
        monkeypatch.setattr(text, "attention_dropout", 0.5)
        for layer in layers:
            monkeypatch.setattr(layer, "attention_dropout", 0.5)
        assert torch.equal(packed_logprobs(attached, batch), without)
        assert set(asked) == {0.0}
        attached.train()
        try:
            asked.clear()
            first, second = (packed_logprobs(attached, batch) for _ in range(2))
        finally:
            attached.eval()
    assert set(asked) == {0.5} and len(asked) == 2  # once per batch, and not in every layer
    assert not torch.equal(first, second) and not torch.equal(first, without)


def test_one_picture_another_content(attached):
    """Samples with unlike pictures at equal ids are not shared, and differ."""
    batch = mp.pack(batch_of("another image"), share_prefix=True)
    assert len(batch.media) == 2
    first, second = batch.unpack_loss(packed_logprobs(attached, batch))
    assert (first - second).abs().max() > 1e-3


def test_no_loss_token_gives_an_empty_result_on_the_graph(attached):
    batch = mp.pack(with_pixels([make_sample([("text", [1, 2]), ("image", (1, 4, 4))])]))
    logprobs = packed_logprobs(attached, batch)
    assert logprobs.shape == (0,) and logprobs.requires_grad
    attached.zero_grad()
    logprobs.sum().backward()
    gradients = [p.grad for p in attached.parameters() if p.grad is not None]
    assert gradients and all((g == 0).all() for g in gradients)
    attached.zero_grad()


def test_nothing_leaks_from_other_rows(attached):
    batch = mp.pack(batch_of("three responses"), share_prefix=True, pad_to_multiple_of=16)
    with torch.no_grad():
        logits = attached(**model_inputs(batch, attached)).logits[0]
    read = torch.zeros(len(logits), dtype=torch.bool)
    read[batch.loss_rows.long()] = True
    leaf = logits.clone().requires_grad_()
    values = mp.selected_logprobs(leaf, batch.loss_targets, batch.loss_rows)
    values.sum().backward()
    assert (leaf.grad[~read] == 0).all() and (leaf.grad[read] != 0).any(dim=1).all()
    poisoned = logits.masked_fill(~read[:, None], torch.nan)
    again = mp.selected_logprobs(poisoned, batch.loss_targets, batch.loss_rows)
    assert torch.equal(again, values)
    fused = packed_logprobs(attached, batch)
    assert (fused - values).abs().max() <= 1e-5


def test_gradient_checkpointing(model):
    batch = mp.pack(batch_of("tree"), share_prefix=True)
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
        model.train()
        model.gradient_checkpointing_enable()
        try:
            again, checkpointed = logprobs_and_gradients(model, batch)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
    assert torch.equal(values, again)
    assert relative_difference(checkpointed, gradients) <= 1e-6


def inputs_of(model):
    batch = mp.pack(batch_of("three responses"))
    return batch, model_inputs(batch, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"visible_until": None}, "visible_until is missing"),
        ({"visible_until": torch.ones(5, dtype=torch.int32)}, r"visible_until has shape \[5\]"),
        ({"use_cache": True}, "use_cache is on|KV cache"),
        ({"output_attentions": True}, "output_attentions is on"),
        ({"attention_mask": 2}, "attention_mask was passed"),
        ({"attention_mask": 4}, "attention_mask was passed"),
    ],
)
def test_wrong_use_is_an_error(attached, change, message):
    batch, inputs = inputs_of(attached)
    count = len(batch.input_ids)
    if change.get("attention_mask") == 2:
        change = {"attention_mask": torch.ones(1, count, dtype=torch.int64)}
    elif change.get("attention_mask") == 4:
        change = {"attention_mask": torch.zeros(1, 1, count, count)}
    with pytest.raises(mp.ModelError, match=message), torch.no_grad():
        attached(**(inputs | change))


def test_a_cache_that_is_handed_in_is_an_error(attached):
    from transformers import DynamicCache

    batch = mp.pack([make_sample([("text", [1, 2]), ("response", [3])])])
    cache = DynamicCache(config=attached.config.get_text_config())
    inputs = model_inputs(batch, attached) | {"past_key_values": cache}
    with torch.no_grad():
        attached(**inputs)  # nothing in it yet: the rows see what they should
        with pytest.raises(mp.ModelError, match="6 keys for 3 queries"):
            attached(**inputs)


def test_a_forced_attention_that_cannot_run_is_an_error(attached, monkeypatch):
    batch = mp.pack(batch_of("three responses"), share_prefix=True)
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    with pytest.raises(mp.BackendError, match="varlen was requested, but varlen needs a CUDA"):
        model_inputs(batch, attached)
    monkeypatch.delenv("MMPACK_ATTENTION")
    inputs = model_inputs(batch, attached)
    assert set(inputs["attention_plan"].choice.values()) == {"sdpa"}
    other = mp.pack(batch_of("text")).attention_plan
    with pytest.raises(mp.ArgumentError, match="the plan is for 24 rows"), torch.no_grad():
        attached(**(inputs | {"attention_plan": other}))


def test_layers_of_an_unknown_kind_are_refused():
    model = tiny_qwen2_5_vl()
    model.config.get_text_config().layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(mp.ModelError, match="layers of chunked_attention, which packed rows"):
        attach(model)
    assert not is_attached(model)


def test_unknown_and_unpackable_families_are_refused(model, monkeypatch):
    from dataclasses import replace

    from mmpack.families import FAMILIES

    monkeypatch.setattr(model.config, "model_type", "llava", raising=False)
    with pytest.raises(mp.LayoutError, match="MM006"):
        attach(model)
    monkeypatch.undo()
    monkeypatch.setitem(FAMILIES, "qwen2_5_vl", replace(FAMILIES["qwen2_5_vl"], packing="no"))
    with pytest.raises(mp.ModelError, match="MM401"):
        attach(model)
    assert not is_attached(model)


def test_detach_restores(model):
    text, tower = model.config.get_text_config(), model.config.vision_config
    original = text._attn_implementation, tower._attn_implementation
    handle = attach(model, tower="keep")
    assert text._attn_implementation == "mmpack" and tower._attn_implementation == original[1]
    handle.detach()
    assert (text._attn_implementation, tower._attn_implementation) == original
    attach(model)
    attach(model).detach()
    assert text._attn_implementation == original[0]
    with attach(model):
        with attach(model) as inner:
            assert inner is model
        assert is_attached(model)
    assert not is_attached(model)
    with pytest.raises(ZeroDivisionError), attach(model):
        1 / 0  # noqa: B018
    assert not is_attached(model)
    ids = torch.tensor([[1, 2, 3]])
    out = model.generate(input_ids=ids, max_new_tokens=2, do_sample=False, pad_token_id=151643)
    assert out.shape[1] > 3


def test_a_handle_does_not_attach_again(model):
    first, second = attach(model), attach(model)
    first.detach()
    second.detach()
    assert not is_attached(model)


@pytest.mark.parametrize("how", ["module", "keyword"])
def test_bidirectional_calls_are_handed_back(how):
    module = torch.nn.Module()
    module.is_causal = how == "keyword"
    q, k, v = torch.randn(3, 2, 7, 8)
    options = {"is_causal": False} if how == "keyword" else {}
    out, _ = visible_attention(module, q[None], k[None], v[None], None, **options)
    weights = torch.softmax(q[None].double() @ k[None].double().mT / 8**0.5, -1)
    expected = (weights @ v[None].double()).transpose(1, 2)
    assert (out - expected).abs().max() < 1e-6


def test_rows_beyond_one_block(monkeypatch):
    """Blocks of queries give what one dense mask gives."""
    monkeypatch.setattr("mmpack.ops.attention.sdpa.QUERY_ROWS", 5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, 8).tolist() for _ in range(2)]
    batch = mp.pack(
        [
            make_sample([("text", p), ("text", [20 + i])], f"{i}{p}")
            for p in prompts
            for i in range(3)
        ],
        share_prefix=True,
    )
    count = len(batch.input_ids)
    q, k, v = torch.randn(1, 4, count, 8), torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)
    out, _ = visible_attention(torch.nn.Module(), q, k, v, None, visible_until=batch.visible_until)
    at = torch.arange(count)
    mask = (at[None] <= at[:, None]) & (at[:, None] < batch.visible_until[None])
    scores = q.double() @ k.repeat_interleave(2, 1).double().mT / 8**0.5
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    expected = (weights @ v.repeat_interleave(2, 1).double()).transpose(1, 2)
    assert (out - expected).abs().max() < 1e-6


def test_a_deep_copy_is_not_attached():
    model = tiny_qwen2_5_vl().train()
    model.gradient_checkpointing_enable()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with attach(model):
            copies = [copy.deepcopy(model), copy.deepcopy(model.model)]
            assert not is_attached(copies[0]) and is_attached(model)
        other, core = copies
        assert torch.equal(other(input_ids=ids, use_cache=True).logits, expected)
        assert core(input_ids=ids).last_hidden_state.shape == (1, 3, 128)
    batch = mp.pack(batch_of("three responses"), share_prefix=True)
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
    for _ in range(2):
        with attach(other):
            found, own = logprobs_and_gradients(other, batch)
        assert torch.equal(found, values) and relative_difference(own, gradients) == 0
    assert not is_attached(other) and not is_attached(model)


def test_a_pickled_model_is_attached_and_detaches_by_itself():
    model = tiny_qwen2_5_vl()  # a new one: hooks that other tests leave can't be pickled
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=True).logits
        with attach(model):
            other = pickle.loads(pickle.dumps(model))
            assert is_attached(other)
            with pytest.raises(mp.ModelError, match="use_cache is on"):
                other(input_ids=ids, use_cache=True)
            detach(other)
            assert is_attached(model) and not is_attached(other)
            assert torch.equal(other(input_ids=ids, use_cache=True).logits, expected)
            with pytest.raises(mp.ModelError, match="use_cache is on"):
                model(input_ids=ids, use_cache=True)
    assert not is_attached(model)


@pytest.mark.parametrize(
    "own", ["eager", "sdpa", {"text_config": "eager", "vision_config": "sdpa"}]
)
def test_detach_restores_what_was_there(own):
    model = tiny_qwen2_5_vl()
    model.set_attn_implementation(own)
    configs = [model.config, model.config.get_text_config(), model.config.vision_config]
    before = [c._attn_implementation for c in configs]
    hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), attach(model):
        outer = attach(model)
        with attach(model):
            found = [c._attn_implementation for c in configs]
            assert found == [before[0], "mmpack", "mmpack_flash_tower"]
        assert is_attached(model)
        outer.detach()
        detach(model)  # twice is once
        attach(model)
        raise ZeroDivisionError
    assert [c._attn_implementation for c in configs] == before
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_an_attention_that_is_set_while_attached_stays():
    model = tiny_qwen2_5_vl()
    text = model.config.get_text_config()
    attach(model)
    model.set_attn_implementation("eager")
    with pytest.raises(mp.ModelError, match=r"was changed while it was attached.*Fix: "):
        attach(model)
    with pytest.raises(mp.ModelError, match="was changed while it was attached"):
        detach(model)
    assert text._attn_implementation == "eager" and not is_attached(model)
    with attach(model):
        assert is_attached(model)
    assert text._attn_implementation == "eager"


def test_two_models_of_one_config_are_refused_at_once():
    model = tiny_qwen2_5_vl()
    other = type(model)(model.config)
    with attach(model), pytest.raises(mp.ModelError, match="shares its config with another model"):
        attach(other)
    with attach(other):
        assert is_attached(other) and not is_attached(model)
