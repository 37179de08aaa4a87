"""Qwen3.5 with eight experts, two per token, and a shared one."""

from support.kits.base import Kit
from support.kits.parts import EXPERTS, NARROW, TOWER, whole, without
from support.kits.qwen3_5 import TEXT_CONFIG, processor

KIT = Kit(
    family="qwen3_5_moe",
    heavy=True,
    model_class="Qwen3_5MoeForConditionalGeneration",
    config_class="Qwen3_5MoeConfig",
    config=whole(
        without(TEXT_CONFIG, "intermediate_size")
        | EXPERTS
        | {"shared_expert_intermediate_size": 64},
        TOWER,
    ),
    narrow=NARROW,
    processor=processor,
)
