"""checkpoint_layers of a model with linear attention: gradients of full checkpointing, in the bytes that are given."""

import pytest
import torch
from support.memory import counted_model, peak_bytes, some_pack
from support.models import logprobs_and_gradients

from mmpack.adapters.transformers import attach, checkpoint_layers
from mmpack.errors import PlanError


@pytest.fixture(scope="module")
def model():
    made = counted_model("qwen3_5")
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def test_gradients_and_bytes(model):
    batch = some_pack("qwen3_5", share_prefix=True, pictures=False, prompt=120)
    layers = len(model.get_decoder().layers)
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
        with checkpoint_layers(model, batch, 10**12) as kept:
            assert (kept.layers, kept.selective) == (layers, 0)
            most = kept.expected
        # one layer less than all: the first one, with linear attention, is recomputed
        with checkpoint_layers(model, batch, most - 1) as kept:
            assert 1 <= kept.layers < layers and kept.expected < most
            found = logprobs_and_gradients(model, batch)
            assert peak_bytes(model, batch) <= kept.expected
        with pytest.raises(PlanError, match="with every layer recomputed"):
            checkpoint_layers(model, batch, kept.expected // 4)
    assert torch.equal(found[0], values)
    assert all(torch.equal(g, gradients[name]) for name, g in found[1].items())
