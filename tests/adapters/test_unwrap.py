"""Wrapped models: PEFT's is opened, others are refused by name."""

import pytest
import torch
from support.families import mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.models import logprobs_and_gradients
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached

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
        attach(model)
        assert same is wrapped and is_attached(wrapped) and is_attached(model)
        batch = mp.pack(samples, share_prefix=True)
        found, ours = logprobs_and_gradients(wrapped, batch)
        logits = wrapped(**model_inputs(batch, wrapped)).logits[0]
    assert not is_attached(wrapped)
    assert (found - wanted).abs().max() <= 1e-5
    assert_as_exact_as_separate(ours, separately, exactly)
    whole = mp.selected_logprobs(logits, batch.loss_targets, rows=batch.loss_rows)
    assert (whole - found).abs().max() <= 1e-5


def test_other_wrappers_are_refused():
    """No error sends anybody to the `.module` of a wrapper that reduces gradients."""
    peft = pytest.importorskip("peft")

    class Engine(torch.nn.Module):  # as DeepSpeed's and FSDP1's are
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = tiny_qwen2_5_vl()
    sizes = {"token_dim": 128, "num_layers": 2, "num_attention_heads": 4}
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, **sizes)
    other = r"(DataParallel|Engine|OptimizedModule|Linear) is not a transformers model\. Fix: pass"
    batch = mp.pad(mixed_batch("qwen2_5_vl")[-1:])
    for wrapper, message in (
        (torch.nn.DataParallel(model), other),
        (Engine(model), other),
        (torch.compile(model), other),
        (torch.nn.Linear(1, 1), other),
        (peft.get_peft_model(model, tuning), "PromptTuningConfig adds its own tokens"),
    ):
        for call in (attach, detach, is_attached, lambda m: packed_logprobs(m, batch)):
            with pytest.raises(mp.ModelError, match=message):
                call(wrapper)
