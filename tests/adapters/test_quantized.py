"""4-bit bases (bitsandbytes) under LoRA: packed and shared rows beside the dequantised weights in float64."""

import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.float64 import assert_as_exact_as_separate, exact, separate
from support.models import logprobs_and_gradients, small_model
from transformers import BitsAndBytesConfig

from mmpack.adapters.transformers import attach
from mmpack.adapters.transformers.prefix import version_of
from mmpack.contracts import TOLERANCES

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.quantized

CLOSE = TOLERANCES["layouts"].value
SETTINGS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def with_adapters(model):
    """LoRA in every Linear but the head, drawn by the adapters' names."""
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                drawn = torch.randn(parameter.shape) * (0.05 if "lora_B" in name else 0.2)
                parameter.copy_(drawn.to(parameter.dtype))
    return model


def dequantised(name, quantised):
    """The same model with plain weights: what the 4-bit ones stand for."""
    plain = small_model(name)
    with torch.no_grad():
        for path, module in quantised.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(
                    module.weight.data, module.weight.quant_state
                )
                plain.get_submodule(path).weight.copy_(weight)
    return plain


def test_adapters_over_a_4_bit_base(tmp_path):
    name = "qwen2_5_vl"
    whole = small_model(name)
    whole.save_pretrained(tmp_path)
    quantised = type(whole).from_pretrained(
        tmp_path,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, **SETTINGS),
        dtype=torch.float32,
        device_map={"": "cpu"},
    )
    kinds = [m for m in quantised.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(kinds) > 10  # of text and tower
    samples = mixed_batch(name)
    wanted, gradients = exact(with_adapters(dequantised(name, quantised)), samples)
    # in eval mode bitsandbytes multiplies in bfloat16 on some CPUs
    model = with_adapters(quantised).train()
    alone, separately = separate(model, samples)
    assert (alone - wanted).abs().max() <= CLOSE
    assert gradients and all("lora" in n for n in gradients)
    with attach(model):
        for layout in ("packed", "shared"):
            batch = LAYOUTS[layout](samples)
            values, found = logprobs_and_gradients(model, batch)
            assert (values - wanted).abs().max() <= CLOSE, layout
            assert_as_exact_as_separate(found, separately, gradients, layout)
    assert version_of(model) == version_of(model)
