"""Wrapped models: LoRA in text and tower has the gradients of separate forwards; other wrappers are refused by name."""

import copy

import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.kits import get_kit
from support.models import logprobs_and_gradients, relative_difference, small_model
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, detach, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached
from mmpack.contracts import TOLERANCES

peft = pytest.importorskip("peft")
CLOSE = TOLERANCES["layouts"].value
OUTER = TOLERANCES["parameter_gradient_fp32"].value


def adapted(name):
    """The family's small model, with adapters in every Linear but the head; they start as something."""
    torch.manual_seed(0)
    # spread by 2: adapters in every Linear on weights spread further round more than 1e-5 in separate forwards too
    base = small_model(name, 2.0)
    config = peft.LoraConfig(r=2, target_modules=get_kit(name).lora_targets(base))
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.adapter
def test_adapters_of_text_and_tower():
    """Merging rounds each weight once; packed and alone are as near as before. Other families: conformance."""
    name = "qwen2_5_vl"
    model, samples = adapted(name), mixed_batch(name)
    wanted, gradients = exact(model, samples)
    alone, separately = separate(model, samples)
    assert (alone - wanted).abs().max() <= CLOSE
    assert gradients and all("lora" in n for n in gradients)
    towers = [n for n in gradients if "visual" in n or "vision" in n]
    assert len(gradients) > len(towers) > 0
    assert all((gradients[n] != 0).any() for n in gradients if "lora_B" in n and n in towers)
    with attach(model) as same:
        attach(model.get_base_model())
        assert same is model and is_attached(model) and is_attached(model.get_base_model())
        for layout in ("packed", "shared"):
            values, found = logprobs_and_gradients(model, LAYOUTS[layout](samples))
            assert (values - wanted).abs().max() <= CLOSE, layout
            assert_as_exact_as_separate(found, separately, gradients, layout)
            # a part of the weights has no comparison with separate forwards in the contract, only its outer bound
            seeing, wanted_there = ({n: g[n] for n in towers} for g in (found, gradients))
            assert relative_difference(seeing, wanted_there) <= OUTER, layout
        with torch.no_grad(), model.disable_adapter():
            plain = packed_logprobs(model, LAYOUTS["shared"](samples))
    assert (plain - wanted).abs().max() > 1e-2 and not is_attached(model)
    merged = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        alone = torch.cat([packed_logprobs(merged, LAYOUTS["left"]([s])) for s in samples])
        for side in (model, merged):
            with attach(side):
                found = packed_logprobs(side, LAYOUTS["shared"](samples))
            assert (found - alone).abs().max() <= (CLOSE if side is merged else 1e-4)


# ---- wrapped models ----


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
