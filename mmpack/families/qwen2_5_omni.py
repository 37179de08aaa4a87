"""Qwen2.5-Omni's thinker: Qwen2.5-VL that hears. A second is 25 positions, also of a video's temporal patches.

A video's sound lies between its placeholders, in chunks of two seconds. The tower reads 200 feature frames at a time.
"""

from mmpack.families.base import Audio, Family, VideoDefaults

QWEN2_5_OMNI = Family(
    name="qwen2_5_omni",
    model_types=("qwen2_5_omni_thinker",),
    processors=("Qwen2_5OmniProcessor",),
    image_token_id=151655,
    video_token_id=151656,
    vision_start_id=151652,
    vision_end_id=151653,
    pad_token_id=151643,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    video_layout="single",
    position_rules=("seconds",),
    position_rows=3,
    tokens_per_second=25.0,
    video_policies=("transformers_qwen2_vl",),
    # what its processor hands its video processor at each call
    video=VideoDefaults(
        area=(128 * 28 * 28, 768 * 28 * 28),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        sampling=(
            ("do_sample_frames", False),
            ("fps", None),
            ("num_frames", None),
            ("min_frames", 4),
            ("max_frames", 768),
        ),
    ),
    # before, the towers stand beside the text model
    oldest_transformers="5.23",
    audio=Audio(
        token_id=151646,
        start_id=151647,
        end_id=151648,
        chunk_frames=200,
        halvings=("up", "down"),
        interleaving="chunks",
        options=(("padding", "max_length"),),
        joint_markers=True,
    ),
)
