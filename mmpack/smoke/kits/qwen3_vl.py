"""Qwen3-VL: deepstack from three blocks of the tower into the first three layers."""

from functools import partial

from mmpack.smoke.kits.base import Kit
from mmpack.smoke.kits.parts import NARROW, TEXT, TOWER, rope, whole, without
from mmpack.smoke.kits.qwen import processor

TEXT_CONFIG = (
    without(TEXT, "bos_token_id", "eos_token_id")
    | rope(5e6, [6, 5, 5], mrope_interleaved=True)
    | {"num_hidden_layers": 4}
)
DEEP_TOWER = TOWER | {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
KIT = Kit(
    family="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    config_class="Qwen3VLConfig",
    config=whole(TEXT_CONFIG, DEEP_TOWER),
    narrow=NARROW,
    processor=partial(processor, "qwen3_vl"),
)
