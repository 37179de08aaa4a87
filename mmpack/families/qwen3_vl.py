"""Qwen3-VL: a video is timestamps in text, each before one temporal patch; deepstack features beside the embeddings.

Each temporal patch is a grid of t = 1 to the position rule, so rules `grid` and `max` are one.
"""

from dataclasses import replace

from mmpack.families.qwen2_vl import QWEN2_VL

QWEN3_VL = replace(
    QWEN2_VL,
    name="qwen3_vl",
    model_types=("qwen3_vl",),
    processors=("Qwen3VLProcessor",),
    patch_size=16,
    video_layout="frames",
    position_rules=("grid",),
    # the last layer's and three of deepstack
    vision_levels=4,
)
