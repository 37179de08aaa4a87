"""Qwen2-VL: the tower's own width is `embed_dim`, that of its output `hidden_size`."""

from functools import partial

from mmpack.smoke.kits.base import Kit
from mmpack.smoke.kits.parts import HALF, TEXT, rope, whole, without
from mmpack.smoke.kits.qwen import processor

TEXT_CONFIG = without(TEXT, "head_dim") | rope(1e6, [4, 6, 6])
KIT = Kit(
    family="qwen2_vl",
    model_class="Qwen2VLForConditionalGeneration",
    config_class="Qwen2VLConfig",
    config=whole(
        TEXT_CONFIG,
        {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
    ),
    narrow={"text_config": HALF, "vision_config": {"hidden_size": 64}},
    processor=partial(processor, "qwen2_vl"),
)
