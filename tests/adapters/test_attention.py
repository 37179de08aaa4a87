"""Attention "mmpack": packed, shared and padded rows give each sample what it gets by itself; wrong use raises."""

import copy
import functools
import importlib.util
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.families import LAYOUTS
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    small_model,
    smallest_qwen2_5_vl,
    with_pixels,
)
from support.samples import make_sample
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_flash_attention_utils import _get_unpad_data

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached, no_mask, visible_attention
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES
from mmpack.ops.attention import TREE

pytestmark = pytest.mark.adapter
IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def model():
    return small_model("qwen2_5_vl")


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
    }[name]
    return with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])


def test_values_and_gradients_are_those_of_each_sample_alone(model):
    samples = batch_of("tree")
    wanted, gradients = exact(model, samples)
    alone, separately = separate(model, samples)
    assert (alone - wanted).abs().max() <= TOLERANCES["layouts"].value
    with attach(model):
        values, found = logprobs_and_gradients(model, LAYOUTS["shared, rounded up"](samples))
    assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value
    assert_as_exact_as_separate(found, separately, gradients)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["mixed", "text", "identical", "prefix", "another image"])
def test_values_are_those_of_each_sample_alone(model, name):
    samples = batch_of(name)
    with torch.no_grad():
        alone = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        found = {
            f"{s} by mask": packed_logprobs(model, LAYOUTS[s](samples)) for s in ("left", "right")
        }
        with attach(model):
            found |= {k: packed_logprobs(model, make(samples)) for k, make in LAYOUTS.items()}
    for layout, values in found.items():
        assert (values - alone).abs().max() <= TOLERANCES["layouts"].value, layout


def test_dropout_of_the_config_counts_in_training_alone(attached, monkeypatch):
    batch, asked = mp.pack(batch_of("three responses"), share_prefix=True), []
    able = type(TREE).choices

    def choices(self, *operands):
        asked.extend([operands[3]] if self is TREE else [])  # dropout
        return able(self, *operands)

    monkeypatch.setattr(type(TREE), "choices", choices)
    with torch.no_grad():
        without = packed_logprobs(attached, batch)
        monkeypatch.setattr(attached.config.get_text_config(), "attention_dropout", 0.5)
        for layer in attached.get_decoder().layers:
            monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
        assert torch.equal(packed_logprobs(attached, batch), without)
        attached.train()
        first, second = (packed_logprobs(attached, batch) for _ in range(2))
        attached.eval()
    assert asked == [0.0, 0.0, 0.5, 0.5]  # once per batch, and not in every layer
    assert not torch.equal(first, second) and not torch.equal(first, without)


def test_no_loss_token_gives_an_empty_result_on_the_graph(attached):
    batch = mp.pack(with_pixels([make_sample([("text", [1, 2]), ("image", (1, 4, 4))])]))
    logprobs, gradients = logprobs_and_gradients(attached, batch)
    assert logprobs.shape == (0,)
    assert gradients and all((g == 0).all() for g in gradients.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"visible_until": None}, "visible_until is missing"),
        ({"visible_until": torch.ones(5, dtype=torch.int32)}, r"visible_until has shape \[5\]"),
        ({"use_cache": True}, "use_cache is on|KV cache"),
        ({"output_attentions": True}, "output_attentions is on"),
        ({"attention_mask": torch.ones(1, 52, dtype=torch.int64)}, "attention_mask was passed"),
        ({"attention_mask": torch.zeros(1, 1, 52, 52)}, "attention_mask was passed"),
        ({"position_ids": None}, "position_ids is missing"),
    ],
)
def test_wrong_use_is_an_error(attached, change, message):
    inputs = model_inputs(mp.pack(batch_of("three responses")), attached)
    with pytest.raises(mp.ModelError, match=message), torch.no_grad():
        attached(**(inputs | change))


def test_a_cache_that_is_handed_in_is_an_error(attached):
    batch = mp.pack([make_sample([("text", [1, 2]), ("response", [3])])])
    cache = DynamicCache(config=attached.config.get_text_config())
    inputs = model_inputs(batch, attached) | {"past_key_values": cache}
    with torch.no_grad():
        attached(**inputs)  # nothing in it yet: the rows see what they should
        with pytest.raises(mp.ModelError, match="6 keys for 3 queries"):
            attached(**inputs)


def test_a_backend_or_a_plan_that_does_not_fit_is_an_error(attached, monkeypatch):
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
    batch.visible_until[:] = len(batch.input_ids)
    for use in (lambda: packed_logprobs(attached, batch), lambda: batch.to("meta")):
        with pytest.raises(mp.ArgumentError, match="was changed since"):
            use()


def test_what_can_not_obey_the_rule_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.config, "model_type", "llava", raising=False)
    with pytest.raises(mp.LayoutError, match="MM006"):
        attach(model)
    monkeypatch.undo()
    monkeypatch.setitem(FAMILIES, "qwen2_5_vl", replace(FAMILIES["qwen2_5_vl"], packing="no"))
    with pytest.raises(mp.ModelError, match="MM401"):
        attach(model)
    monkeypatch.undo()
    text = model.config.get_text_config()
    monkeypatch.setattr(text, "layer_types", ["full_attention", "chunked_attention"])
    with pytest.raises(mp.ModelError, match="layers of chunked_attention, which packed rows"):
        attach(model)
    for wrong, match in (
        ({"tower": "sdpa"}, "tower is 'sdpa'"),
        ({"text": "no"}, "text is of type str"),
        ({"text": False, "tower": "keep"}, "leave nothing to attach"),
    ):
        with pytest.raises(mp.ArgumentError, match=match):
            attach(model, **wrong)
    assert not is_attached(model)


def test_bidirectional_calls_are_handed_back():
    module, (q, k, v) = torch.nn.Module(), torch.randn(3, 1, 2, 7, 8)
    out, _ = visible_attention(module, q, k, v, None, is_causal=False)
    weights = torch.softmax(q.double() @ k.double().mT / 8**0.5, -1)
    assert (out - (weights @ v.double()).transpose(1, 2)).abs().max() < 1e-6
    module.is_causal = False
    assert torch.equal(visible_attention(module, q, k, v, None)[0], out)


# ---- attach and detach, of text model and tower ----------------------------------------------------------


def names(model):
    return [
        m._attn_implementation for m in (model.config.get_text_config(), model.config.vision_config)
    ]


def test_text_and_tower_are_attached_and_put_back_each_by_itself():
    model = smallest_qwen2_5_vl()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    tower = "mmpack_flash_tower"
    hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), attach(model, text=False):
        assert names(model) == ["sdpa", tower] and not is_attached(model)
        with attach(model) as inner:
            assert inner is model and names(model) == ["mmpack", tower]
            with attach(model, tower="keep"):
                pass
            assert names(model) == ["mmpack", tower]
        1 / 0  # noqa: B018
    with attach(model, tower="keep"):
        assert names(model) == ["mmpack", "eager"]
        with attach(model, text=False):
            assert names(model) == ["mmpack", tower]
        assert names(model) == ["mmpack", "eager"]
    handles = attach(model), attach(model)
    for handle in handles:
        handle.detach()  # twice is once
    assert names(model) == ["sdpa", "eager"]
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks
    out = model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False, pad_token_id=151643)
    assert out.shape[1] > 3


@pytest.mark.parametrize("part", ["text model", "vision tower"])
def test_an_attention_that_is_set_while_attached_stays(part):
    model = smallest_qwen2_5_vl()
    attach(model)
    (model if part == "text model" else model.model.visual).set_attn_implementation("eager")
    for call in (attach, detach):
        with pytest.raises(
            mp.ModelError, match=rf"the {part}'s attention was changed while.*Fix: "
        ):
            call(model)
    left = ["eager", "eager"] if part == "text model" else ["sdpa", "eager"]
    assert names(model) == left
    with attach(model):
        assert is_attached(model)
    assert names(model) == left


@pytest.mark.parametrize("part", ["text model", "vision tower"])
def test_two_models_of_one_config_are_refused_at_once(part):
    """And where one part can't be attached, neither is."""
    model = smallest_qwen2_5_vl()
    other = type(model)(model.config if part == "text model" else copy.deepcopy(model.config))
    if part == "vision tower":
        other.model.visual = type(model.model.visual)(model.config.vision_config)
    with attach(model, text=part == "text model"):
        with pytest.raises(mp.ModelError, match="shares its config with another model"):
            attach(other)
        assert not vars(other.model.get_decoder()).get("_mmpack_kept")
    with attach(other):
        assert is_attached(other) and (part != "text model" or not is_attached(model))


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies_are_models_of_their_own(how):
    """A deep copy is detached; a pickled model is attached, and detaches by itself."""
    if how == "pickled" and importlib.util.find_spec("kernels"):
        pytest.skip("with Hugging Face's kernels, transformers' own models can't be pickled")
    model, batch = smallest_qwen2_5_vl(), mp.pack(batch_of("three responses"), share_prefix=True)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=True).logits
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
        other = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
        assert is_attached(model) and is_attached(other) == (how == "pickled")
        if how == "pickled":
            with pytest.raises(mp.ModelError, match="use_cache is on"):
                other(input_ids=IDS, use_cache=True)
        detach(other)
        assert is_attached(model) and names(other) == ["sdpa", "sdpa"]
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS, use_cache=True).logits, expected)
    for _ in range(2):
        with attach(other):
            found, own = logprobs_and_gradients(other, batch)
        assert torch.equal(found, values) and relative_difference(own, gradients) == 0
    assert not is_attached(other) and not is_attached(model)


# ---- gradient checkpointing ----


def samples():
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    return with_pixels([make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4, 6)])


def shared():
    return mp.pack(samples(), share_prefix=True)


def gradients_of(loss, model):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def expected():
    """Without checkpointing: of each sample by itself, by the model's own attention."""
    model = made()
    values = [packed_logprobs(model, mp.pad([sample])) for sample in samples()]
    return gradients_of(sum(v.square().sum() for v in values), model)


def made(attention="sdpa"):
    model = smallest_qwen2_5_vl().train()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("reentrant", "attention"), [(True, "eager"), (False, "sdpa")])
def test_backward_after_detach(expected, reentrant, attention):
    model = made(attention)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layer = model.get_decoder().layers[0]
    own = layer._gradient_checkpointing_func
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    assert not is_attached(model)
    assert layer._gradient_checkpointing_func is own
    model.generate(  # between forward and backward, as a framework may
        input_ids=torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
    assert not is_attached(model)
    assert model.config.get_text_config()._attn_implementation == attention


def test_checkpoint_wrapper_of_torch(expected):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    model = made()
    kind = type(model.get_decoder().layers[0])
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    found = gradients_of(loss, model)
    found = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found.items()}
    assert relative_difference(found, expected) <= 2e-6


@pytest.mark.parametrize(("reentrant", "attention"), [(True, "sdpa"), (False, "eager")])
def test_other_checkpoints_raise(reentrant, attention):
    """A user's own checkpoint around a layer: it doesn't know of the attention, so its gradients would be wrong."""
    model = made(attention)
    for layer in model.get_decoder().layers:
        layer.forward = functools.partial(own_checkpoint, layer.forward, reentrant)
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    with pytest.raises(mp.ModelError, match="Fix: detach after backward") as caught:
        loss.backward()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [flex_attention_forward, lambda *args: _get_unpad_data(args[-1])])
def test_flex_and_flash_attention_raise_too(read):
    q = torch.randn(1, 1, 4, 32)
    with pytest.raises(mp.ModelError, match="Fix: detach after backward"):
        read(torch.nn.Module(), q, q, q, no_mask())


def own_checkpoint(forward, reentrant, hidden, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), hidden, use_reentrant=reentrant)


def test_checkpointing_that_is_switched_while_attached(expected):
    model = made()
    attach(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.get_decoder().layers[0]
    own = layer._gradient_checkpointing_func
    loss = packed_logprobs(model, shared()).square().sum()
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
    loss = packed_logprobs(model, shared()).square().sum()
    detach(model)
    assert layer._gradient_checkpointing_func is own
    with pytest.raises(mp.ModelError, match="Fix: detach after backward"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_layers(expected, reentrant):
    model = made()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.get_decoder().layers:
        layer.compile(backend="aot_eager")
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
