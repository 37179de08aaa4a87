"""Sliding windows and two-way blocks, beside transformers' own masks. Every family's layouts: tests/conformance."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.families import LAYOUTS, mixed_batch
from support.models import small_model, spread_out
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    compile_layers,
    layer_rules,
    model_inputs,
    packed_logprobs,
)
from mmpack.adapters.transformers.layer_rules import LayerPlans
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.contracts import TOLERANCES
from mmpack.families import FAMILIES
from mmpack.families.base import TwoWay
from mmpack.invariant import batch_invariant
from mmpack.versions import blocks_keep_to_windows

pytestmark = pytest.mark.adapter
NAME = "gemma3"


def with_window(rows):
    """Gemma 3 whose windows are of so many rows; its pictures are blocks of four."""
    model = small_model(NAME)
    model.config.get_text_config().sliding_window = rows
    for layer in model.get_decoder().layers:
        if layer.self_attn.sliding_window:
            layer.self_attn.sliding_window = rows
    return model


@pytest.fixture
def model():
    return with_window(8)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 7])
def test_blocks_longer_than_the_window_and_across_its_edge(rows):
    model, samples = with_window(rows), mixed_batch(NAME)
    if rows == 3 and not blocks_keep_to_windows():  # here they see past the window
        with attach(model), pytest.raises(mp.ModelError, match="a block of 4 placeholders is lon"):
            packed_logprobs(model, mp.pack(samples))
        return
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        with attach(model):
            for layout, make in LAYOUTS.items():
                found = packed_logprobs(model, make(samples))
                assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value, layout


def test_windows_that_a_config_asks_for():
    """Mistral's in all layers, without `layer_types`."""
    config = tiny_model("internvl").config
    config.text_config = transformers.MistralConfig(
        vocab_size=151_936,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=7,
    )
    config.vision_config.hidden_size = 64
    torch.manual_seed(0)
    model = spread_out(transformers.AutoModelForImageTextToText.from_config(config)).eval()
    rng = np.random.default_rng(2)
    prompt = ("text", rng.integers(0, 151_643, 9))
    parts = [[prompt, ("response", rng.integers(0, 151_643, n))] for n in (12, 4)]
    samples = [make_sample(p, f"s{k}", family="internvl") for k, p in enumerate(parts)]
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        with attach(model):
            for make in LAYOUTS.values():
                found = packed_logprobs(model, make(samples))
                assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
            plans = model_inputs(mp.pack(samples), model)["attention_plan"]
    assert isinstance(plans, LayerPlans) and any(plan.windowed for plan in plans.plans)
    with pytest.raises(mp.ModelError, match=r"the model has sliding windows. Fix: use"):
        kv_bytes_per_token(model)


def test_visible_from_and_shared_rows(monkeypatch):
    """Each block begins at its first row; media that touch are one, and are shared whole or not at all."""
    family = "qwen2_vl"  # whose pictures are larger
    image = FAMILIES[family].image_token_id
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], two_way=TwoWay(("image",))))
    x, y, z = (("image", (1, 4, 4), name) for name in "xyz")
    head, tail = ("text", [1, 2]), ("response", [3])
    parts = [[head, x, y, tail], [head, x, z, tail], [head, x, y, ("response", [4])]]
    samples = [make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)]
    for sample in samples:  # without the markers between: the placeholders touch
        keep = np.isin(sample.input_ids, [image, 1, 2, 3, 4])
        moved = np.cumsum(keep)
        for span in (*sample.modality_spans, *sample.loss_spans):
            span.start, span.stop = int(moved[span.start] - 1), int(moved[span.stop - 1])
        sample.input_ids = sample.input_ids[keep]
        sample.position_ids = np.tile(np.arange(len(sample.input_ids)), (3, 1))
    batch = mp.pack(samples, share_prefix=True)
    # two rows of text, a block of eight for the first and third, another for the second
    assert batch.visible_from.dtype == torch.int32
    assert batch.visible_from.tolist() == [0, 1, *[2] * 8, 10, 11, *[12] * 8, 20]
    padded = mp.pad(samples[:1], side="left", pad_to_multiple_of=6)
    assert padded.visible_from.tolist() == [[0, 1, 2, *[3] * 8, 11]]


def test_a_plan_as_a_collator_hands_it_over_and_none_at_all(model):
    batch = mp.pack(mixed_batch(NAME), share_prefix=True)
    own = {"attention_plan": batch.attention_plan}
    with torch.no_grad(), attach(model):
        inputs = model_inputs(batch, model)
        expected = model(**inputs).logits
        assert torch.equal(model(**(inputs | own)).logits, expected)
        for name, change in (
            ("attention_plan", {"attention_plan": None}),
            ("visible_from", own | {"visible_from": None}),
        ):
            with pytest.raises(mp.ModelError, match=rf"{name} is missing\. Fix"):
                model(**(inputs | change))
        batch.visible_from = torch.arange(len(batch.input_ids), dtype=torch.int32)
        with pytest.raises(mp.ArgumentError, match="the plan was made of another visible_from"):
            model_inputs(batch, model)


def test_layers_have_the_rules_of_their_config(model, monkeypatch):
    def rules():
        return layer_rules.layer_rules(model, "test")

    family, size = FAMILIES[NAME], model.get_decoder().layers[0].self_attn.head_dim
    assert rules() == ((8, size, True), (None, size, True))
    for two_way, expected in (
        (TwoWay(("image",), ("sliding_attention",)), (True, False)),
        (TwoWay(("image",), None, ("use_bidirectional_attention", "vision")), (False, False)),
    ):
        monkeypatch.setitem(FAMILIES, NAME, replace(family, two_way=two_way))
        assert rules() == ((8, size, expected[0]), (None, size, expected[1]))
    monkeypatch.setattr(model.config.text_config, "layer_types", ["full_attention"] * 4)
    assert rules() == ()
    with monkeypatch.context() as patch:
        patch.setattr(model.get_decoder().layers[0].self_attn, "is_causal", False)
        with pytest.raises(mp.ModelError, match="attach: the model's text layers attend in both"):
            attach(model)
    with pytest.raises(mp.ModelError, match="a layer has a window of 8 with heads of 16, the co"):
        LayerPlans((layer_rules.LayerRule(None, 16, False),), (None,)).of(8, 16)


def test_the_invariant_mode_refuses_windows_that_count():
    """Of samples within the window it gives each the same bits alone and shared."""
    samples, short = mixed_batch(NAME), with_window(4096)
    model = with_window(8)
    with (
        batch_invariant(),
        attach(model),
        pytest.raises(mp.BackendError, match=r"batch_invariant runs fixed_blocks.*no sliding"),
    ):
        model_inputs(mp.pack(samples), model)
    with attach(short), batch_invariant(short), torch.no_grad():
        alone = torch.cat([packed_logprobs(short, mp.pack([s])) for s in samples])
        assert torch.equal(packed_logprobs(short, mp.pack(samples, share_prefix=True)), alone)


@pytest.mark.slow
def test_compiled_layers(model):
    batch, own = mp.pack(mixed_batch(NAME), share_prefix=True), copy.deepcopy(model)
    compile_layers(own, tower=False, backend="aot_eager")
    with attach(model), attach(own), torch.no_grad():
        expected, found = (packed_logprobs(m, batch) for m in (model, own))
    assert (found - expected).abs().max() <= TOLERANCES["layouts"].value
