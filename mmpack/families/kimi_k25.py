"""Kimi K2.5: a text model with latent attention (MLA) and experts, positions that count tokens, a MoonViT tower.

The tower averages up to four frames of a video into one run of placeholders, each after its time of the clock.
"""

from mmpack.families.base import Family, Texts

KIMI_K25 = Family(
    name="kimi_k25",
    model_types=("kimi_k25",),
    processors=("Kimi_K25Processor",),
    image_token_id=163605,
    video_token_id=163840,
    vision_start_id=163602,
    vision_end_id=163604,
    pad_token_id=163839,
    first_ids=(163584,),
    turn_ids=(163587, 163588, 163594),
    patch_size=14,
    spatial_merge_size=2,
    video_layout="frames",
    pixel_layout="squares",
    pooled_frames=4,
    projector="mm_projector",
    texts=Texts(
        frame="{time}<|media_begin|>video{run}",
        frame_start_id=163603,  # <|media_content|>
        frame_time="first",
    ),
    vocab_size=163_968,
    oldest_transformers="5.15",  # before, its tower takes nothing that is known of the grids
)
