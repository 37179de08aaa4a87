"""Qwen3-VL with eight experts, two per token."""

from functools import partial

from mmpack.smoke.kits.base import Kit
from mmpack.smoke.kits.parts import EXPERTS, NARROW, whole
from mmpack.smoke.kits.qwen import processor
from mmpack.smoke.kits.qwen3_vl import DEEP_TOWER, TEXT_CONFIG

KIT = Kit(
    family="qwen3_vl_moe",
    heavy=True,
    model_class="Qwen3VLMoeForConditionalGeneration",
    config_class="Qwen3VLMoeConfig",
    config=whole(TEXT_CONFIG | EXPERTS, DEEP_TOWER),
    narrow=NARROW,
    processor=partial(processor, "qwen3_vl_moe"),
)
