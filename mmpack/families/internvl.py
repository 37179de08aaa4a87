"""InternVL3: an image is t tiles of one size (with a thumbnail last, where there are several), positions count tokens.

A tile of 448 pixels is a grid of 32 × 32 patches, 2 × 2 of which are one token. A video is images of one tile each.
"""

from mmpack.families.base import Family, ImageSettings, Texts

INTERNVL = Family(
    name="internvl",
    model_types=("internvl",),
    processors=("InternVLProcessor",),
    image_token_id=151667,
    vision_start_id=151665,
    vision_end_id=151666,
    pad_token_id=151643,
    turn_ids=(151644,),
    patch_size=14,
    spatial_merge_size=2,
    pixel_layout="tiles",
    texts=Texts(markers=True),
    images=ImageSettings(passed=(("crop_to_patches", True),)),
    coordinates="normalized_1000",
)
