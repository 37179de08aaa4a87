"""Mistral 3: an image is rows of merged patches, `[IMG_BREAK]` behind each, `[IMG_END]` behind the last.

No video. Positions count tokens. The tower reads pictures of unlike sizes as one padded tensor.
"""

from mmpack.families.base import Family, ImageSettings

MISTRAL3 = Family(
    name="mistral3",
    model_types=("mistral3",),
    processors=("PixtralProcessor",),
    image_token_id=10,
    vision_end_id=13,
    pad_token_id=11,
    first_ids=(1,),
    turn_ids=(17, 3, 4),
    patch_size=14,
    spatial_merge_size=2,
    pixel_layout="canvas",
    vocab_size=131_072,
    row_end_id=12,
    images=ImageSettings(limit_names=(("max_pixels", "size.longest_edge"),)),
)
