"""planning.memory against counted bytes of real passes: every dense family, both dtypes, plain and shared packs."""

import pytest
import torch
from support.memory import counted_model, load_of, peak_bytes, some_pack

from mmpack.adapters.transformers import attach
from mmpack.planning.memory import memory_model

pytestmark = pytest.mark.adapter
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen3_5")
LEAST, MOST = 0.94, 1.20  # of what is counted


def checkpointed(model, on):
    model.gradient_checkpointing_disable()
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return counted_model(request.param)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("share_prefix", "pictures"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)]
)
def test_counted_bytes(model, share_prefix, pictures):
    family = model.config.model_type
    batch = some_pack(family, share_prefix, pictures, prompt=300 if pictures else 250)
    bytes_of, load = memory_model(model.config, "float32", "sdpa"), load_of(batch, model)
    with attach(model):
        found = {
            "checkpointed": (
                bytes_of.peak(load),
                peak_bytes(checkpointed(model, True), batch),
            ),
            "all kept": (
                bytes_of.peak(load, kept=bytes_of.layers, kept_blocks=bytes_of.tower.blocks),
                peak_bytes(checkpointed(model, False), batch),
            ),
            "without gradients": (
                bytes_of.peak(load, grad=False),
                peak_bytes(model, batch, grad=False),
            ),
        }
    for what, (said, counted) in found.items():
        assert LEAST <= said / counted <= MOST, (what, said, counted)


@pytest.mark.slow
def test_half_precision_and_a_frozen_tower():
    model = checkpointed(counted_model("qwen2_5_vl", torch.bfloat16), True)
    batch = some_pack("qwen2_5_vl", True, prompt=300)
    bytes_of, load = memory_model(model.config, "bfloat16", "sdpa"), load_of(batch, model)
    with attach(model):
        counted = peak_bytes(model, batch)
        assert LEAST <= bytes_of.peak(load) / counted <= MOST
        model.model.visual.requires_grad_(False)
        frozen = peak_bytes(model, batch)
    assert frozen < counted
    assert LEAST <= bytes_of.peak(load, train_tower=False) / frozen <= MOST
