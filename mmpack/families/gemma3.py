"""Gemma 3: every picture is one square of 896 pixels and 256 tokens, between blank lines; positions count tokens.

The chat template writes vision start for a picture; with pan and scan, crops follow the picture, each with text before
it. Tokens of a picture see each other in every layer; five of six layers see a window.
"""

from mmpack.families.base import Family, ImageSettings, Texts, TwoWay

GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3",),
    processors=("Gemma3Processor",),
    image_token_id=262144,
    vision_start_id=255999,
    vision_end_id=256000,
    pad_token_id=0,
    first_ids=(2,),
    turn_ids=(105,),
    patch_size=14,
    # 64 × 64 patches of the square become 16 × 16 tokens
    spatial_merge_size=4,
    pixel_layout="tiles",
    vocab_size=262_208,
    image_prompt_id=255999,
    texts=Texts(
        markers=True,
        image="\n\n{run}\n\n",
        tiles="Here is the original image {first} and here are some crops to help you see better {rest}",
    ),
    images=ImageSettings(
        defaults=(
            ("do_pan_and_scan", False),
            ("pan_and_scan_min_crop_size", 256),
            ("pan_and_scan_max_num_crops", 4),
            ("pan_and_scan_min_ratio_to_activate", 1.2),
        )
    ),
    token_types="token_type_ids",
    two_way=TwoWay(("image",)),
)
