"""Qwen2-VL: the tower's own width is `embed_dim`, that of its output `hidden_size`."""

from functools import partial

from support.kits.base import Kit
from support.kits.parts import HALF
from support.kits.qwen import processor

from mmpack.demo.tiny_models import MODELS

KIT = Kit(
    family="qwen2_vl",
    model_class="Qwen2VLForConditionalGeneration",
    config_class="Qwen2VLConfig",
    config=MODELS["qwen2_vl"][1],
    narrow={"text_config": HALF, "vision_config": {"hidden_size": 64}},
    processor=partial(processor, "qwen2_vl"),
)
