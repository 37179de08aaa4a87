"""planning.memory against the allocator's peak on a GPU: layers as wide as Qwen2.5-VL-3B's, four of them, 16k rows."""

import pytest
import torch
from support.memory import load_of
from support.models import with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import attach, checkpoint_layers, packed_logprobs
from mmpack.planning.memory import memory_model

pytestmark = pytest.mark.gpu
LEAST, MOST = 0.85, 1.20  # of what is allocated
GROUPS, ANSWERS, PROMPT, ANSWER = 2, 6, 1000, 1000


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        whole = tiny_model("qwen2_5_vl")
    config = whole.config
    config.text_config.update(
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 4,
            # another dict: every tiny model has the old one
            "rope_parameters": config.text_config.rope_parameters | {"mrope_section": [16, 24, 24]},
        }
    )
    config.vision_config.update(
        {"depth": 4, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    )
    config.vision_config.update({"out_hidden_size": 2048, "fullatt_block_indexes": [3]})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = type(whole)(config).to(torch.bfloat16).train()
    model.get_input_embeddings().requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def batches():
    samples = []
    for g in range(GROUPS):
        prompt = [("text", range(g, g + PROMPT)), ("image", (1, 64, 64), f"p{g}")]
        samples += [
            make_sample([*prompt, ("response", range(k, k + ANSWER))], f"{g}/{k}", f"g{g}")
            for k in range(ANSWERS)
        ]
    with_pixels(samples)
    shared, plain = mp.pack(samples, share_prefix=True), mp.pack(samples[:ANSWERS])
    assert len(shared.input_ids) > 16_000 and len(plain.input_ids) > 16_000
    return {"shared": shared, "plain": plain}


def allocated(model, batch, grad=True):
    """Bytes at the peak of a pass beyond weights, gradients and batch. Kernels are compiled before."""
    batch = batch.to("cuda")
    for measured in (False, True):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(grad):
            values = packed_logprobs(model, batch)
            if grad:
                values.sum().backward()
            del values
        if measured:
            return torch.cuda.max_memory_allocated() - before
    raise AssertionError


@pytest.mark.parametrize("layout", ["shared", "plain"])
def test_the_allocator_s_peak(model, batches, layout):
    batch, bytes_of = batches[layout], memory_model(model.config, "bfloat16")
    load, blocks = load_of(batch, model), bytes_of.tower.blocks
    found = {}
    with attach(model):
        model.gradient_checkpointing_disable()
        said = bytes_of.peak(load, kept=bytes_of.layers, kept_blocks=blocks)
        found["all kept"] = said, allocated(model, batch)
        found["without gradients"] = bytes_of.peak(load, grad=False), allocated(model, batch, False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found["checkpointed"] = bytes_of.peak(load), allocated(model, batch)
        memory = bytes_of.peak(load, kept=2)
        with checkpoint_layers(model, batch, memory) as kept:
            assert kept.layers == 2
            found["two kept"] = kept.expected, allocated(model, batch)
        memory = bytes_of.peak(load, kept=1, selective=3)
        with checkpoint_layers(model, batch, memory, selective=True) as kept:
            assert (kept.layers, kept.selective) == (1, 3)
            found["three selective"] = kept.expected, allocated(model, batch)
    for what, (said, counted) in found.items():
        assert LEAST <= said / counted <= MOST, (what, said, counted)
