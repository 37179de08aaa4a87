"""Qwen3-Omni's thinker: experts, deepstack features, and audio. A second is 13 positions, as an audio has tokens.

A video's sound lies between its placeholders token by token, by time. The tower reads 100 feature frames at a time.
"""

from mmpack.families.base import Audio, Family, VideoDefaults

QWEN3_OMNI_MOE = Family(
    name="qwen3_omni_moe",
    model_types=("qwen3_omni_moe_thinker",),
    processors=("Qwen3OmniMoeProcessor",),
    image_token_id=151655,
    video_token_id=151656,
    vision_start_id=151652,
    vision_end_id=151653,
    pad_token_id=151643,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    video_layout="single",
    position_rules=("seconds",),
    position_rows=3,
    tokens_per_second=13.0,
    # the last layer's and three of deepstack
    vision_levels=4,
    video_policies=("transformers_qwen2_vl",),
    # what its processor hands its video processor at each call
    video=VideoDefaults(
        area=(128 * 32 * 32, 768 * 32 * 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
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
        token_id=151675,
        start_id=151669,
        end_id=151670,
        chunk_frames=100,
        halvings=("up", "up", "up"),
        interleaving="time",
        options=(("padding", True), ("truncation", False)),
        cuts_times=False,
        padding_shows=True,
    ),
)
