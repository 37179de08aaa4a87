"""Qwen3 and Qwen3-MoE, which read text only. Not built in: an adapter to a stage of text registers it."""

from dataclasses import replace

from mmpack.families.qwen2_vl import QWEN2_VL

QWEN3 = replace(
    QWEN2_VL,
    name="qwen3",
    model_types=("qwen3", "qwen3_moe"),
    processors=("Qwen3Tokenizer",),
    image_token_id=None,
    video_token_id=None,
    vision_start_id=None,
    vision_end_id=None,
    video_layout="images",
    position_rules=("count",),
    coordinates=None,
    video=None,
    vocab_size=151_936,
)
