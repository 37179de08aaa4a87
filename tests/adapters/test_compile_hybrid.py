"""Compiled layers of a model with linear attention: which parts are, values and gradients of eager ones, graphs."""

import copy

import pytest
import torch
from adapters.test_compile import check, pack, varlen  # noqa: F401
from support.models import small_model
from torch._dynamo.testing import CompileCounterWithBackend

from mmpack.adapters.transformers import attach, compile_layers, packed_logprobs
from mmpack.adapters.transformers.compile import CompiledPart, decoder_layers

pytestmark = pytest.mark.adapter


def parts_of(layer):
    """Names of a layer's modules that ran compiled."""
    forwards = {name: vars(m).get("forward") for name, m in layer.named_modules() if name}
    return {n for n, f in forwards.items() if isinstance(f, CompiledPart) and f.compiled}


def test_norms_and_mlps_beside_linear_attention():
    model = small_model("qwen3_5").train()
    compile_layers(model, tower=False, backend="eager")
    check(model, [pack(0, True, "qwen3_5")])
    linear, full = decoder_layers(model)[0], decoder_layers(model)[3]
    expected = {"input_layernorm", "post_attention_layernorm", "mlp", "linear_attn.norm"}
    assert parts_of(linear) == expected and linear.forward.compiled is None
    assert parts_of(full) == set() and full.forward.compiled is not None


def test_what_is_not_packed_is_not_compiled():
    counter = CompileCounterWithBackend("eager")
    model = small_model("qwen3_5")
    compile_layers(model, backend=counter)
    batch = pack(0, False, "qwen3_5")
    assert not any(layer.forward.packed for layer in decoder_layers(model)[:3])
    model.generate(
        input_ids=batch.input_ids[None, :4].long(),
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    assert counter.frame_count == 0
    other = copy.deepcopy(model)
    layer = decoder_layers(other)[0]
    assert layer.mlp.forward.whole is layer.forward and layer.mlp.forward.layer is layer.mlp


@pytest.mark.slow
def test_packs_of_other_lengths_make_no_more_graphs():
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen3_5").train()
    compile_layers(model, tower=False, backend=counter)
    check(model, [pack(0, True, "qwen3_5", prompts=2)])
    graphs = counter.frame_count
    check(model, [pack(size, True, "qwen3_5", prompts) for size, prompts in ((1, 3), (3, 2))])
    # a layer with full attention, a norm, an MLP, the norm of a net's output
    assert counter.frame_count == graphs == 4
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, [pack(2, True, "qwen3_5", prompts=2)])
    with attach(model), torch.no_grad():
        for size in (1, 2):
            packed_logprobs(model, pack(size, True, "qwen3_5"))
