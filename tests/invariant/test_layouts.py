"""With the mode on, samples have the same bits in every layout: tiny models of each family, on a CPU."""

import warnings

import pytest
import torch
from support.layout_bits import (
    alone,
    differing,
    gradients_by_sample,
    layouts_of,
    logprobs_by_sample,
    some_samples,
)
from support.models import small_model

import mmpack as mp
from mmpack import invariant
from mmpack.adapters.transformers import attach

pytestmark = pytest.mark.adapter

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "dtype"), [*((f, torch.float32) for f in FAMILIES), ("qwen2_5_vl", torch.bfloat16)]
)
def test_logprobs_are_equal_in_every_layout(family, dtype):
    model, samples = small_model(family).to(dtype), some_samples(family)
    with attach(model), invariant.batch_invariant(model):
        expected = alone(logprobs_by_sample, model, samples)
        for layout, batch in layouts_of(samples).items():
            assert differing(logprobs_by_sample(model, batch), expected) == [], layout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe"])
def test_gradients_to_activations_are_equal_alone_packed_and_padded(family):
    model, samples = small_model(family), some_samples(family)
    layouts = layouts_of(samples)
    del layouts["shared"]  # a prompt's rows sum over their branches
    with attach(model), invariant.batch_invariant(model):
        expected = alone(gradients_by_sample, model, samples)
        for layout, batch in layouts.items():
            assert differing(gradients_by_sample(model, batch), expected) == [], layout


def test_a_branchs_own_rows_have_equal_gradients_under_a_shared_prefix():
    """Those of its response; the prompt's sum over the branches."""
    model, samples = small_model("qwen2_5_vl"), some_samples("qwen2_5_vl")[:3]
    with attach(model), invariant.batch_invariant(model):
        expected = alone(gradients_by_sample, model, samples)
        found = gradients_by_sample(model, mp.pack(samples, share_prefix=True))
    for sample in samples:
        own = slice(sample.loss_spans[0].start, None)
        assert torch.equal(found[sample.sample_id][own], expected[sample.sample_id][own])


def test_without_the_models_norms_and_with_checkpointing():
    model, samples = small_model("qwen2_5_vl"), some_samples("qwen2_5_vl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # another name, which older ones lack
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with attach(model), invariant.batch_invariant():
        expected = alone(gradients_by_sample, model, samples)
        found = gradients_by_sample(model, mp.pack(samples))
    assert differing(found, expected) == []


def test_plain_torch_is_right_in_the_mode():
    """Values are those of the mode off, but for rounding."""
    model, samples = small_model("qwen3_vl"), some_samples("qwen3_vl")
    batch = mp.pack(samples, share_prefix=True)
    with attach(model):
        plain = logprobs_by_sample(model, batch)
        with invariant.batch_invariant(model):
            found = logprobs_by_sample(model, batch)
        again = logprobs_by_sample(model, batch)
    assert all((found[name] - x).abs().max() <= 1e-5 for name, x in plain.items())
    assert differing(again, plain) == []
