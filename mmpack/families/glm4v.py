"""GLM-4.1V: images between their marks; a video is frames in text, each between an image's marks, its second behind it.

Frames bear the image's id: what lies between a video's marks is the video's. Two frames are one temporal patch.
"""

from mmpack.families.base import Family, Texts, VideoDefaults

GLM4V = Family(
    name="glm4v",
    model_types=("glm4v",),
    processors=("Glm4vProcessor",),
    image_token_id=151343,
    video_token_id=151343,
    vision_start_id=151339,
    vision_end_id=151340,
    pad_token_id=151329,
    first_ids=(151331, 151333),
    turn_ids=(151335, 151336, 151337, 151338),
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    video_layout="frames",
    position_rules=("grid",),
    vocab_size=151_552,
    coordinates="normalized_1000",
    video_prompt_id=151344,
    video_bounds=(151341, 151342),
    texts=Texts(frame="{run}{whole}", frame_time="first"),
    video=VideoDefaults(
        policies=("transformers_glm4v",),
        area=(112 * 112, 28 * 28 * 2 * 30_000),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        sampling=(
            ("do_sample_frames", True),
            ("fps", 2),
            ("num_frames", 16),
            ("max_duration", 300),
        ),
    ),
)
