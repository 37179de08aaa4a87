"""Qwen2.5-VL: a block with windows and one without, two positions per second."""

from functools import partial

from mmpack.smoke.kits.base import Kit
from mmpack.smoke.kits.parts import NARROW, TOWER, whole
from mmpack.smoke.kits.qwen import processor
from mmpack.smoke.kits.qwen2_vl import TEXT_CONFIG

KIT = Kit(
    family="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    config_class="Qwen2_5_VLConfig",
    config=whole(TEXT_CONFIG, TOWER | {"fullatt_block_indexes": [1], "tokens_per_second": 2}),
    narrow=NARROW,
    processor=partial(processor, "qwen2_5_vl"),
)
