"""Qwen3-VL with eight experts, two per token."""

from functools import partial

from support.kits.base import Kit
from support.kits.parts import NARROW
from support.kits.qwen import processor

from mmpack.demo.tiny_models import MODELS

KIT = Kit(
    family="qwen3_vl_moe",
    heavy=True,
    model_class="Qwen3VLMoeForConditionalGeneration",
    config_class="Qwen3VLMoeConfig",
    config=MODELS["qwen3_vl_moe"][1],
    narrow=NARROW,
    processor=partial(processor, "qwen3_vl_moe"),
)
