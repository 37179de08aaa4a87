"""Qwen2-VL: dynamic resolution, one run of placeholders per medium; each temporal patch is one position further."""

from mmpack.families.base import Family

QWEN2_VL = Family(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    processors=("Qwen2VLProcessor",),
    image_token_id=151655,
    video_token_id=151656,
    vision_start_id=151652,
    vision_end_id=151653,
    pad_token_id=151643,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    video_layout="single",
    position_rules=("grid", "max"),
    position_rows=3,
    tokens_per_second=None,
    coordinates="normalized_1000",
)
