"""Qwen2.5-VL: a block with windows and one without, two positions per second."""

from functools import partial

from support.kits.base import Kit
from support.kits.parts import NARROW
from support.kits.qwen import processor

from mmpack.demo.tiny_models import MODELS

KIT = Kit(
    family="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    config_class="Qwen2_5_VLConfig",
    config=MODELS["qwen2_5_vl"][1],
    narrow=NARROW,
    processor=partial(processor, "qwen2_5_vl"),
)
