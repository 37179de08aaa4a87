"""Qwen3-VL: a video is timestamps in text, each before one temporal patch; deepstack features next to embeddings.

Each temporal patch is a grid of t = 1 to the position rule, so rules `grid` and `max` are one.
"""

from dataclasses import replace

from mmpack.families.base import VideoDefaults
from mmpack.families.qwen2_vl import QWEN2_VL

QWEN3_VL = replace(
    QWEN2_VL,
    name="qwen3_vl",
    model_types=("qwen3_vl",),
    processors=("Qwen3VLProcessor",),
    patch_size=16,
    video_layout="frames",
    position_rules=("grid",),
    video=VideoDefaults(
        policies=("transformers_qwen3_vl", "qwen_vl_utils", "vllm"),
        area=(64 * 64, 24576 * 32 * 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        sampling=(
            ("do_sample_frames", True),
            ("fps", 2),
            ("num_frames", None),
            ("min_frames", 4),
            ("max_frames", 768),
        ),
        max_video_tokens=768,
    ),
)
