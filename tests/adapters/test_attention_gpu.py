"""Packed, shared and padded rows on a GPU, against the same model padded on the CPU."""

import pytest
import torch
from support.models import logprobs_and_gradients, relative_difference, spread_out, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach
from mmpack.ops.attention import TREE

pytestmark = pytest.mark.gpu


def some_samples():
    image, video = ("image", (1, 8, 6), "x"), ("video", (2, 4, 4), "f")
    prompt = [("text", range(40)), image, ("text", [7, 8])]
    parts = [[*prompt, ("response", range(k, k + 20))] for k in (100, 200, 110)]
    parts += [
        [("text", [1, 2]), ("response", [3])],
        [video, ("text", [5]), image, ("response", [6])],
    ]
    return with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])


@pytest.mark.parametrize(
    ("dtype", "values_off", "gradients_off", "attention"),
    [
        (torch.float32, 1e-4, 1e-4, "auto"),
        *((torch.bfloat16, 0.15, 0.1, name) for name in ("auto", "sdpa", "varlen", "flash_attn_4")),
    ],
)
def test_layouts_agree(dtype, values_off, gradients_off, attention, monkeypatch, no_tf32):
    reason = TREE.explain(torch.device("cuda"), dtype, 32).get(attention)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("MMPACK_ATTENTION", attention)
    model = spread_out(tiny_qwen2_5_vl())
    samples = some_samples()
    expected, expected_gradients = logprobs_and_gradients(model, mp.pad(samples))
    model = model.to("cuda", dtype)
    batches = {
        "packed": mp.pack(samples, pad_to_multiple_of=64),
        "shared": mp.pack(samples, share_prefix=True),
        "left": mp.pad(samples, side="left"),
        "right": mp.pad(samples, side="right"),
    }
    found = {"left by mask": logprobs_and_gradients(model, batches["left"].to("cuda"))}
    with attach(model):
        for layout, batch in batches.items():
            found[layout] = logprobs_and_gradients(model, batch.to("cuda"))
    for layout, (values, gradients) in found.items():
        assert values.device.type == "cuda"
        off = (values.cpu() - expected).abs().max()
        assert off <= values_off, (layout, off)
        on_cpu = {n: g.cpu() for n, g in gradients.items()}
        off = relative_difference(on_cpu, expected_gradients)
        assert off <= gradients_off, (layout, off)


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_a_batch_moves_as_one(make):
    samples = some_samples()
    batch = make(samples, token_columns={"x": [range(len(s)) for s in samples]}).to("cuda")
    on_host = [
        name
        for name, value in vars(batch).items()
        for x in (value.values() if isinstance(value, dict) else [value])
        if torch.is_tensor(x) and not x.is_cuda
    ]
    assert on_host == [] and batch.pixel_values.is_cuda and batch.device.type == "cuda"
    assert len(batch.unpack_tokens(batch.token_columns["x"])) == len(samples)
