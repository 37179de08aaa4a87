"""Gemma 4: a picture keeps its shape and fills a budget of tokens; positions count tokens.

A video is its frames in text, each after its clock time. In models of `use_bidirectional_attention="vision"` tokens of
a picture or a frame see each other, in the layers that see a window.
"""

from mmpack.families.base import Family, ImageSettings, Texts, TwoWay, VideoDefaults

GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4",),
    processors=("Gemma4Processor",),
    image_token_id=258880,
    video_token_id=258884,
    vision_start_id=255999,
    vision_end_id=258882,
    pad_token_id=0,
    first_ids=(2,),
    turn_ids=(105,),
    patch_size=16,
    spatial_merge_size=3,
    video_layout="frames",
    pixel_layout="padded",
    vocab_size=262_144,
    images=ImageSettings(limit_names=(("max_pixels", "max_soft_tokens"),)),
    unread=(("audio", 258881),),
    texts=Texts(markers=True, frame="{clock} {run}", between=" "),
    video=VideoDefaults(
        policies=("transformers_uniform",),
        area=(48 * 48, 70 * 48 * 48),  # of a frame: a token, and the 70 that fit
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        sampling=(("do_sample_frames", True), ("fps", None), ("num_frames", 32)),
        resize="budget",
    ),
    oldest_transformers="5.23",
    token_types="mm_token_type_ids",
    two_way=TwoWay(
        media=("image", "video"),
        layers=("sliding_attention",),
        setting=("use_bidirectional_attention", "vision"),
    ),
    logit_cap="final_logit_softcapping",
)
