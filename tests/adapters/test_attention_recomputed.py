"""Gradient checkpointing: what backward runs again, in a model that was detached after its forward."""

import functools

import pytest
import torch
from support.models import relative_difference, smallest_qwen2_5_vl, with_pixels
from support.samples import make_sample
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_flash_attention_utils import _get_unpad_data

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached, no_mask

pytestmark = pytest.mark.adapter


def samples():
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    return with_pixels([make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4, 6)])


def shared():
    return mp.pack(samples(), share_prefix=True)


def gradients_of(loss, model):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def expected():
    """Without checkpointing: of each sample by itself, by the model's own attention."""
    model = made()
    values = [packed_logprobs(model, mp.pad([sample])) for sample in samples()]
    return gradients_of(sum(v.square().sum() for v in values), model)


def made(attention="sdpa"):
    model = smallest_qwen2_5_vl().train()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("reentrant", "attention"), [(True, "eager"), (False, "sdpa")])
def test_backward_after_detach(expected, reentrant, attention):
    model = made(attention)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layer = model.get_decoder().layers[0]
    own = layer._gradient_checkpointing_func
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    assert not is_attached(model)
    assert layer._gradient_checkpointing_func is own
    model.generate(  # between forward and backward, as a framework may
        input_ids=torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
    assert not is_attached(model)
    assert model.config.get_text_config()._attn_implementation == attention


def test_checkpoint_wrapper_of_torch(expected):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    model = made()
    kind = type(model.get_decoder().layers[0])
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    found = gradients_of(loss, model)
    found = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found.items()}
    assert relative_difference(found, expected) <= 2e-6


@pytest.mark.parametrize(("reentrant", "attention"), [(True, "sdpa"), (False, "eager")])
def test_other_checkpoints_raise(reentrant, attention):
    """A user's own checkpoint around a layer: it doesn't know of the attention, so its gradients would be wrong."""
    model = made(attention)
    for layer in model.get_decoder().layers:
        layer.forward = functools.partial(own_checkpoint, layer.forward, reentrant)
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    with pytest.raises(mp.ModelError, match="Fix: detach after backward") as caught:
        loss.backward()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [flex_attention_forward, lambda *args: _get_unpad_data(args[-1])])
def test_flex_and_flash_attention_raise_too(read):
    q = torch.randn(1, 1, 4, 32)
    with pytest.raises(mp.ModelError, match="Fix: detach after backward"):
        read(torch.nn.Module(), q, q, q, no_mask())


def own_checkpoint(forward, reentrant, hidden, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), hidden, use_reentrant=reentrant)


def test_checkpointing_that_is_switched_while_attached(expected):
    model = made()
    attach(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.get_decoder().layers[0]
    own = layer._gradient_checkpointing_func
    loss = packed_logprobs(model, shared()).square().sum()
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
    loss = packed_logprobs(model, shared()).square().sum()
    detach(model)
    assert layer._gradient_checkpointing_func is own
    with pytest.raises(mp.ModelError, match="Fix: detach after backward"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_layers(expected, reentrant):
    model = made()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.get_decoder().layers:
        layer.compile(backend="aot_eager")
    with attach(model):
        loss = packed_logprobs(model, shared()).square().sum()
    assert relative_difference(gradients_of(loss, model), expected) <= 2e-6
