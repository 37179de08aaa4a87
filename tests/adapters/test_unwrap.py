"""Wrapped models: PEFT's is opened, others are refused by name."""

import pytest
import torch
from support.families import mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.models import logprobs_and_gradients

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.tiny import tiny_qwen2_5_vl

pytestmark = pytest.mark.adapter


def with_lora(model, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():  # LoRA starts as nothing
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return wrapped.eval()


def test_lora():
    samples = mixed_batch("qwen2_5_vl")
    model = tiny_qwen2_5_vl()
    with torch.no_grad():
        before = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
    wrapped = with_lora(model)
    wanted, exactly = exact(wrapped, samples)
    _, separately = separate(wrapped, samples)
    assert (wanted - before).abs().max() > 1e-3
    assert separately and all("lora" in name for name in separately)
    with attach(wrapped) as same:
        assert same is wrapped and is_attached(wrapped) and is_attached(model)
        batch = mp.pack(samples, share_prefix=True)
        found, ours = logprobs_and_gradients(wrapped, batch)
        logits = wrapped(**batch.model_inputs(wrapped)).logits[0]
    assert not is_attached(wrapped)
    assert (found - wanted).abs().max() <= 1e-5
    assert_as_exact_as_separate(ours, separately, exactly)
    whole = mp.selected_logprobs(logits, batch.loss_targets, rows=batch.loss_rows)
    assert (whole - found).abs().max() <= 1e-5


def test_a_handle_of_either_detaches():
    wrapped = with_lora(tiny_qwen2_5_vl())
    handle = attach(wrapped)
    attach(wrapped.get_base_model()).detach()
    assert not is_attached(wrapped)
    handle.detach()


def test_an_adapter_on_the_head_is_named():
    wrapped = with_lora(tiny_qwen2_5_vl(), modules_to_save=["lm_head"])
    with attach(wrapped), pytest.raises(mp.ModelError, match="merge the adapter"):
        packed_logprobs(wrapped, mp.pack(mixed_batch("qwen2_5_vl")))


def test_prompts_of_peft_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=2,
        token_dim=128,
        num_layers=2,
        num_attention_heads=4,
    )
    wrapped = peft.get_peft_model(tiny_qwen2_5_vl(), config)
    with pytest.raises(mp.ModelError, match=r"PromptTuningConfig adds tokens"):
        attach(wrapped)


def test_other_wrappers_are_refused():
    for call in (
        lambda m: attach(m),
        lambda m: is_attached(m),
        lambda m: packed_logprobs(m, mp.pad(mixed_batch("qwen2_5_vl")[-1:])),
    ):
        with pytest.raises(
            mp.ModelError, match=r"DataParallel is no .*pass its \.module"
        ) as caught:
            call(torch.nn.DataParallel(tiny_qwen2_5_vl()))
        assert "\n" not in str(caught.value)
    with pytest.raises(mp.ModelError, match="Linear is no transformers model"):
        attach(torch.nn.Linear(1, 1))
