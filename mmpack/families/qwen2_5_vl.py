"""Qwen2.5-VL: as Qwen2-VL, but a video's temporal positions follow its seconds.

Released checkpoints say 2 tokens per second; a bare transformers config says 4.
"""

from dataclasses import replace

from mmpack.families.qwen2_vl import QWEN2_VL

QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    processors=("Qwen2_5_VLProcessor",),
    position_rules=("grid", "max", "grid_int"),
    tokens_per_second=2.0,
    coordinates="absolute_pixels",
)
