"""Sliding windows and two-way blocks: packed, shared and padded rows get what transformers' own masks give a sample."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.float64 import Wide, wide_copy
from support.models import relative_difference, spread_out
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    is_attached,
    kv_bytes_per_token,
    layer_rules,
    model_inputs,
    packed_logprobs,
)
from mmpack.adapters.transformers.layer_rules import KEEPS_TO_WINDOW, LayerPlans
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES
from mmpack.families.base import TwoWay
from mmpack.invariant import batch_invariant

pytestmark = pytest.mark.adapter
IMAGE = 151655
WINDOW = 7
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture
def family(monkeypatch):
    """Qwen2-VL's ids and spans, with the attention of Gemma 3."""
    made = replace(
        FAMILIES["qwen2_vl"],
        model_types=("gemma3",),
        two_way=TwoWay(("image",)),
        position_rules=("count",),
    )
    monkeypatch.setitem(FAMILIES, "qwen2_vl", made)
    return made


@pytest.fixture(scope="module")
def model():
    text = SIZES | {"num_hidden_layers": 3, "layer_types": TYPES}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=TOWER, image_token_id=IMAGE, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    return spread_out(transformers.Gemma3ForConditionalGeneration(config)).eval()


def samples_of(name):
    """Blocks of four and six rows: within the window of seven, across its edge, and two that touch."""
    rng = np.random.default_rng(5)

    def text(n):
        return "text", rng.integers(0, 151_643, n)

    def response(n):
        return "response", rng.integers(0, 151_643, n)

    image, other = ("image", (1, 4, 4), "x"), ("image", (1, 4, 6), "y")
    prompt = [text(4), image, text(3)]
    parts = {
        "text": [[text(n), response(m)] for n, m in ((3, 20), (9, 1), (1, 6))],
        "tree": [
            [*prompt, response(12), other, text(1), response(9)],
            [*prompt, response(2), text(4), response(2)],
            [*prompt, response(2), image, response(5)],
            [text(5), other, response(3)],
            [text(2), response(2)],
        ],
        "long blocks": [
            [text(2), ("image", (1, 8, 8), "z"), response(4)],
            [
                text(2),
                ("image", (1, 8, 8), "z"),
                response(2),
                ("image", (1, 8, 6), "w"),
                response(3),
            ],
        ],
    }[name]
    return [make_sample(p, f"s{i}", family="qwen2_vl") for i, p in enumerate(parts)]


def alone(model, sample):
    """Hidden states [L, H] by transformers' own masks, of the sample by itself."""
    ids = torch.from_numpy(sample.input_ids)[None]
    kinds = (ids == IMAGE).long()
    return model.model(input_ids=ids, token_type_ids=kinds, use_cache=False).last_hidden_state[0]


def inputs_of(batch, model):
    """Of a batch whose pictures stay the embeddings of their ids."""
    bare = copy.copy(batch)
    bare.media, bare.media_order = [], []
    return model_inputs(bare, model)


def together(model, batch):
    """Hidden states [L, H] of each sample."""
    with attach(model, tower="keep"):
        out = model.model(**inputs_of(batch, model)).last_hidden_state.flatten(0, 1)
    return batch.unpack_tokens(out)


LAYOUTS = {
    "packed": lambda s: mp.pack(s, pad_to_multiple_of=16),
    "shared": lambda s: mp.pack(s, share_prefix=True),
    "left": lambda s: mp.pad(s, side="left"),
    "right": lambda s: mp.pad(s, side="right"),
}


@pytest.mark.parametrize("name", ["text", "tree"])
def test_hidden_states_are_those_of_each_sample_alone(model, family, name):
    samples = samples_of(name)
    with torch.no_grad():
        wanted = [alone(model, s) for s in samples]
        for layout, make in LAYOUTS.items():
            for a, b in zip(together(model, make(samples)), wanted, strict=True):
                assert (a - b).abs().max() <= TOLERANCES["layouts"].value, layout


@pytest.mark.skipif(not KEEPS_TO_WINDOW, reason="blocks of this transformers see past the window")
def test_blocks_longer_than_the_window(model, family):
    samples = samples_of("long blocks")
    with torch.no_grad():
        wanted = [alone(model, s) for s in samples]
        for layout in ("shared", "left"):
            for a, b in zip(together(model, LAYOUTS[layout](samples)), wanted, strict=True):
                assert (a - b).abs().max() <= TOLERANCES["layouts"].value, layout


@pytest.mark.skipif(KEEPS_TO_WINDOW, reason="blocks of this transformers keep to the window")
def test_blocks_longer_than_the_window_are_refused(model, family):
    with pytest.raises(mp.ModelError, match="a block of 16 placeholders is longer than the window"):
        together(model, mp.pack(samples_of("long blocks")))


def test_gradients_are_those_of_each_sample_alone(model, family):
    """In float64, through windows, blocks and shared rows."""
    samples = samples_of("tree")
    wide = wide_copy(model)
    weights = [torch.randn(len(s), 32, dtype=torch.float64) for s in samples]

    def gradients(hidden):
        wide.zero_grad(set_to_none=True)
        sum((h * w).sum() for h, w in zip(hidden, weights, strict=True)).backward()
        return {n: p.grad.clone() for n, p in wide.named_parameters() if p.grad is not None}

    with Wide():
        wanted = gradients([alone(wide, s) for s in samples])
        for layout in ("shared", "left"):
            found = gradients(together(wide, LAYOUTS[layout](samples)))
            assert relative_difference(found, wanted) <= 1e-10, layout


def test_the_tests_can_see_a_wrong_rule(model, family):
    """Without the window, and without blocks, values are off by far more than the bound."""
    samples = samples_of("tree")
    batch = mp.pack(samples)
    with torch.no_grad():
        right = together(model, batch)
        batch.visible_from = torch.arange(len(batch.input_ids), dtype=torch.int32)
        with pytest.raises(mp.ArgumentError, match="the plan was made of another visible_from"):
            together(model, batch)
        causal = replace(FAMILIES["qwen2_vl"], two_way=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, "qwen2_vl", causal)
            batch = mp.pack(samples)
            assert batch.visible_from is None
            assert (
                max((a - b).abs().max() for a, b in zip(together(model, batch), right, strict=True))
                > 1e-2
            )
            patch.setattr(model.config.text_config, "sliding_window", 1000)
            for layer in model.model.language_model.layers:
                if layer.self_attn.sliding_window:
                    patch.setattr(layer.self_attn, "sliding_window", 1000)
            wide = together(model, batch)
            assert (wide[-1] - right[-1]).abs().max() <= TOLERANCES["layouts"].value
            assert (wide[0] - right[0]).abs().max() > 1e-2


def test_visible_from_and_shared_rows(family):
    """Each block begins at its first row; media that touch are one, and are shared whole or not at all."""
    x, y, z = (("image", (1, 4, 4), name) for name in "xyz")
    head, tail = ("text", [1, 2]), ("response", [3])
    samples = [
        make_sample(p, f"s{i}", family="qwen2_vl")
        for i, p in enumerate(
            [[head, x, y, tail], [head, x, z, tail], [head, x, y, ("response", [4])]]
        )
    ]
    for sample in samples:  # without the markers between: the placeholders touch
        keep = np.isin(sample.input_ids, [IMAGE, 1, 2, 3, 4])
        moved = np.cumsum(keep)
        for spans in (sample.modality_spans, sample.loss_spans):
            for span in spans:
                span.start, span.stop = int(moved[span.start] - 1), int(moved[span.stop - 1])
        sample.input_ids = sample.input_ids[keep]
        sample.position_ids = np.arange(len(sample.input_ids))[None]
    batch = mp.pack(samples, share_prefix=True)
    # two rows of text, a block of eight for the first and third, another for the second
    assert batch.visible_from.dtype == torch.int32
    assert batch.visible_from.tolist() == [0, 1, *[2] * 8, 10, 11, *[12] * 8, 20]
    padded = mp.pad(samples[:1], side="left", pad_to_multiple_of=6)
    assert padded.visible_from.tolist() == [[0, 1, 2, *[3] * 8, 11]]


@pytest.mark.parametrize("family_name", ["qwen2_5_vl", "internvl"])
def test_windows_that_a_config_asks_for(family_name):
    """Qwen2.5-VL's `use_sliding_window` from a layer on, and Mistral's in all layers: against their own masks."""
    config = tiny_model(family_name).config
    if family_name == "internvl":
        config.text_config = transformers.MistralConfig(**SIZES, num_hidden_layers=2)
        config.vision_config.hidden_size = 64
    else:
        text = config.text_config.to_dict() | {"use_sliding_window": True, "sliding_window": WINDOW}
        text |= {"max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}
        config.text_config = type(config.text_config)(**text)
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText
    model = spread_out(kind.from_config(config)).eval()
    rng = np.random.default_rng(2)
    prompt = ("text", rng.integers(0, 151_643, 9))
    samples = [
        make_sample(
            [prompt, ("response", rng.integers(0, 151_643, n))], f"s{n}", family=family_name
        )
        for n in (12, 4)
    ]
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        with attach(model):
            for make in LAYOUTS.values():
                batch = make(samples)
                assert batch.visible_from is None
                found = packed_logprobs(model, batch)
                assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
            plans = model_inputs(mp.pack(samples), model)["attention_plan"]
    assert isinstance(plans, LayerPlans) and any(plan.windowed for plan in plans.plans)
    with pytest.raises(
        mp.ModelError, match="Fix: use a model with full, causal attention in all layers"
    ):
        kv_bytes_per_token(model)


def test_a_plan_as_a_collator_hands_it_over_and_none_at_all(model, family):
    samples = samples_of("tree")
    batch = mp.pack(samples, share_prefix=True)
    with torch.no_grad(), attach(model, tower="keep"):
        inputs = inputs_of(batch, model)
        expected = model.model(**inputs).last_hidden_state
        found = model.model(**(inputs_of(batch, model) | {"attention_plan": batch.attention_plan}))
        assert torch.equal(found.last_hidden_state, expected)
        with pytest.raises(mp.ModelError, match=r"attention_plan is missing\. Fix"):
            model.model(**(inputs_of(batch, model) | {"attention_plan": None}))
        with pytest.raises(mp.ModelError, match=r"visible_from is missing\. Fix"):
            bare = inputs_of(batch, model) | {"attention_plan": batch.attention_plan}
            model.model(**(bare | {"visible_from": None}))
    assert not is_attached(model)


def test_layers_have_the_rules_of_their_config(model, family, monkeypatch):
    rules = layer_rules.layer_rules(model, "test")
    assert rules == ((WINDOW, 16, True), (None, 16, True))
    sliding = replace(family, two_way=TwoWay(("image",), ("sliding_attention",)))
    monkeypatch.setitem(FAMILIES, "qwen2_vl", sliding)
    assert layer_rules.layer_rules(model, "test") == ((WINDOW, 16, True), (None, 16, False))
    setting = ("use_bidirectional_attention", "vision")
    off = replace(family, two_way=TwoWay(("image",), ("sliding_attention",), setting))
    monkeypatch.setitem(FAMILIES, "qwen2_vl", off)
    assert layer_rules.layer_rules(model, "test") == ((WINDOW, 16, False), (None, 16, False))
    monkeypatch.setattr(model.config.text_config, "layer_types", ["full_attention"] * 3)
    assert layer_rules.layer_rules(model, "test") == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.language_model.layers[0].self_attn, "is_causal", False)
        with pytest.raises(mp.ModelError, match="attach: the model's text layers attend in both"):
            attach(model)
    with pytest.raises(
        mp.ModelError, match="a layer has a window of 7 with heads of 16, the config"
    ):
        LayerPlans((layer_rules.LayerRule(None, 16, False),), (None,)).of(WINDOW, 16)


def test_the_invariant_mode_refuses_windows_that_count(model, family):
    with batch_invariant(), attach(model, tower="keep"):
        with pytest.raises(mp.BackendError, match="fixed_blocks keeps to no sliding window"):
            inputs_of(mp.pack(samples_of("tree")), model)
        inputs_of(mp.pack(samples_of("tree")[-1:]), model)  # shorter than the window


def test_layers_that_run_again_in_backward(model, family):
    own = copy.deepcopy(model).train()
    batch = mp.pack(samples_of("tree"), share_prefix=True)

    def gradients():
        own.zero_grad(set_to_none=True)
        sum(h.square().sum() for h in together(own, batch)).backward()
        return {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}

    expected = gradients()
    own.gradient_checkpointing_enable()
    assert relative_difference(gradients(), expected) <= 1e-6


@pytest.mark.slow
def test_compiled_layers(model, family):
    from mmpack.adapters.transformers import compile_layers

    own = copy.deepcopy(model)
    batch = mp.pack(samples_of("tree"), share_prefix=True)
    expected = together(model, batch)
    compile_layers(own, tower=False, backend="aot_eager")
    for a, b in zip(together(own, batch), expected, strict=True):
        assert (a - b).abs().max() <= TOLERANCES["layouts"].value
