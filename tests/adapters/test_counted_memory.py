"""planning.memory against counted bytes of real passes: every dense family, both dtypes, plain and shared packs."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from support.live_bytes import LiveBytes
from support.memory import counted_model, load_of, peak_bytes, some_pack
from transformers.modeling_layers import GradientCheckpointingLayer

from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.transformers.modules import tower_of
from mmpack.planning.memory import memory_model

pytestmark = pytest.mark.adapter
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen3_5")
LEAST, MOST = 0.94, 1.20  # of what is counted
# of one layer or block; Qwen2-VL's in transformers 5.8 keeps a fiftieth more
NEAR = 0.004 if Version(transformers.__version__) >= Version("5.17") else 0.02


def checkpointed(model, on):
    model.gradient_checkpointing_disable()
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return counted_model(request.param)


@pytest.mark.few(1)
def test_counted_bytes(model):
    batch = some_pack(model.config.model_type, share_prefix=True, prompt=300)
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


def held_bytes(model, family, pictures):
    """What autograd keeps of a forward."""
    batch = some_pack(family, False, pictures, prompt=60)
    known = [*model.parameters(), *model.buffers()]
    known += [t for t in vars(batch).values() if torch.is_tensor(t)]
    with attach(checkpointed(model, False)), LiveBytes(known) as live:
        values = packed_logprobs(model, batch)
        held = live.now
    del values
    return held, load_of(batch, model)


@pytest.mark.slow
def test_one_more_layer_and_one_more_block_keep_what_the_terms_say(model):
    """Nearly to the byte, where no keys are shared."""
    family = model.config.model_type
    bytes_of = memory_model(model.config, "float32", "sdpa")
    layer, block = bytes_of.linear or bytes_of.layer, bytes_of.tower.block
    few, load = held_bytes(counted_model(family, layers=2), family, False)
    more, _ = held_bytes(counted_model(family, layers=3), family, False)
    said = layer.activations(load.rows, load.rows, load.chunks)
    assert said == pytest.approx(more - few, rel=NEAR)
    few, load = held_bytes(model, family, True)
    kinds = (m for m in tower_of(model.model).modules() if isinstance(m, torch.nn.ModuleList))
    blocks = next(m for m in kinds if isinstance(m[0], GradientCheckpointingLayer))
    blocks.append(copy.deepcopy(blocks[0]))
    try:
        more, _ = held_bytes(model, family, True)
    finally:
        del blocks[-1]
    assert block.activations(load.patches, load.patches) == pytest.approx(more - few, rel=NEAR)
