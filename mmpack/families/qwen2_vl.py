"""Qwen2-VL: dynamic resolution, one run of placeholders per medium; each temporal patch is one position further."""

from mmpack.families.base import Family, VideoDefaults

QWEN2_VL = Family(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    processors=("Qwen2VLProcessor",),
    image_token_id=151655,
    video_token_id=151656,
    vision_start_id=151652,
    vision_end_id=151653,
    pad_token_id=151643,
    turn_ids=(151644,),
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    video_layout="single",
    position_rules=("grid", "max"),
    coordinates="normalized_1000",
    video=VideoDefaults(
        policies=("transformers_qwen2_vl", "qwen_vl_utils", "vllm"),
        area=(56 * 56, 16384 * 28 * 28),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        sampling=(
            ("do_sample_frames", False),
            ("fps", None),
            ("num_frames", None),
            ("min_frames", 4),
            ("max_frames", 768),
        ),
        max_video_tokens=128_000,
    ),
)
