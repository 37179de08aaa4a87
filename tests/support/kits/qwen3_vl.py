"""Qwen3-VL: deepstack from three blocks of the tower into the first three layers."""

from functools import partial

from support.kits.base import Kit
from support.kits.parts import NARROW
from support.kits.qwen import processor

from mmpack.demo.tiny_models import MODELS

KIT = Kit(
    family="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    config_class="Qwen3VLConfig",
    config=MODELS["qwen3_vl"][1],
    narrow=NARROW,
    processor=partial(processor, "qwen3_vl"),
)
