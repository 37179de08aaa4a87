"""Batches and models that were changed after they were made: one line that says what, and the fix."""

import importlib.metadata

import pytest
import torch
from support.models import with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl
from transformers.utils.import_utils import is_flash_attn_2_available

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.errors import ModelError, SchemaError

pytestmark = pytest.mark.adapter


def samples():
    parts = [("text", [1]), ("image", (1, 4, 6), "x"), ("response", [2, 3])]
    return with_pixels([make_sample(parts)])


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[:-4], r"has shape \[20, 1176\], the batch's media need \[24, 1176\]"),
        (lambda x: torch.cat([x, x]), r"has shape \[48, 1176\]"),
        (lambda x: x[:, :-1], r"has shape \[24, 1175\]"),
        (lambda x: None, "is missing"),
    ],
)
def test_pixels_that_were_cut_after_packing(make, change, says):
    batch = make(samples())
    batch.pixel_values = change(batch.pixel_values)
    with attach(tiny_qwen2_5_vl()) as model, pytest.raises(SchemaError, match=says):
        packed_logprobs(model, batch)


@pytest.mark.skipif(
    is_flash_attn_2_available()
    or any(d.name == "kernels" for d in importlib.metadata.distributions()),
    reason="what the config names is there",
)
def test_an_attention_that_is_only_in_the_config():
    model, batch = tiny_qwen2_5_vl(), mp.pad(samples())
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match=r"attention is 'flash_attention_2'.* Fix: .*'sdpa'"):
        packed_logprobs(model, batch)
