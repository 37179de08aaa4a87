"""With the mode on, samples have the same bits in every layout, on a GPU: bf16 and float32."""

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
from support.models import logprobs_and_gradients, relative_difference, small_model
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack import invariant
from mmpack.adapters.transformers import attach

pytestmark = pytest.mark.gpu

CASES = [
    ("qwen2_5_vl", torch.bfloat16),
    ("qwen2_5_vl", torch.float32),
    ("qwen3_vl", torch.bfloat16),
    ("qwen3_vl_moe", torch.bfloat16),
    ("internvl", torch.bfloat16),
]


def on_gpu(samples):
    return {name: batch.to("cuda") for name, batch in layouts_of(samples).items()}


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logprobs_are_equal_in_every_layout(family, dtype, no_tf32):
    model, samples = small_model(family).to("cuda", dtype), some_samples(family)
    with attach(model), invariant.batch_invariant(model):
        expected = alone(logprobs_by_sample, model, samples, "cuda")
        for layout, batch in on_gpu(samples).items():
            assert differing(logprobs_by_sample(model, batch), expected) == [], layout


@pytest.mark.parametrize(("family", "dtype"), CASES[:3])
@pytest.mark.parametrize("norms", [True, False])
def test_gradients_to_activations_are_equal_alone_packed_and_padded(family, dtype, norms, no_tf32):
    model, samples = small_model(family).to("cuda", dtype), some_samples(family)
    layouts = on_gpu(samples)
    del layouts["shared"]  # a prompt's rows sum over their branches
    with attach(model), invariant.batch_invariant(model if norms else None):
        expected = alone(gradients_by_sample, model, samples, "cuda")
        for layout, batch in layouts.items():
            assert differing(gradients_by_sample(model, batch), expected) == [], layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_parameter_gradients_are_as_right_as_without(dtype, no_tf32):
    samples = some_samples("qwen2_5_vl")
    wide = small_model("qwen2_5_vl").double().cuda()
    model = small_model("qwen2_5_vl").to("cuda", dtype)
    batch = mp.pack(samples).to("cuda")
    with attach(wide):
        expected_values, expected = logprobs_and_gradients(wide, batch)
    with attach(model):
        plain_values, plain = logprobs_and_gradients(model, batch)
        with invariant.batch_invariant(model):
            values, found = logprobs_and_gradients(model, batch)
    bound = relative_difference(plain, expected)
    assert relative_difference(found, expected) <= max(1.5 * bound, 1e-5)
    off = (values.double() - expected_values).abs().max()
    assert off <= max(2 * (plain_values.double() - expected_values).abs().max(), 1e-5)


def test_long_samples_of_a_wider_model(no_tf32):
    """Heads of 32, several blocks of queries and of keys, sequences that end anywhere in a block."""
    from support.models import with_pixels
    from support.samples import make_sample

    model = tiny_model("qwen2_5_vl").to("cuda", torch.bfloat16)
    prompt = [("text", range(300)), ("image", (1, 20, 14), "x"), ("text", [7, 8])]
    samples = [
        make_sample([*prompt, ("response", range(10, 10 + n))], f"s{n}") for n in (1, 130, 517, 900)
    ]
    samples += [
        make_sample([("text", range(n)), ("response", range(n))], f"t{n}") for n in (5, 640)
    ]
    samples = with_pixels(samples)
    with attach(model), invariant.batch_invariant(model):
        expected = alone(logprobs_by_sample, model, samples, "cuda")
        for layout, batch in on_gpu(samples).items():
            assert differing(logprobs_by_sample(model, batch), expected) == [], layout
