"""SmolVLM and SmolVLM2 of 256M and 500M: Idefics3's layout. A picture is slices of 512 pixels, then the whole.

Positions count tokens; a view is 64 tokens. Pass the frames of a video as images.
The checkpoints of 2.2B have patches of 14 pixels and merge 3 × 3: register a family with these.
"""

from mmpack.families.base import Family, ImageSettings, Views

FAKE = "<fake_token_around_image>"
SMOLVLM = Family(
    name="smolvlm",
    model_types=("smolvlm", "idefics3"),
    processors=("Idefics3Processor", "SmolVLMProcessor"),
    image_token_id=49190,
    pad_token_id=2,
    first_ids=(1,),
    patch_size=16,
    spatial_merge_size=4,
    pixel_layout="tiles",
    vocab_size=49_280,
    views=Views(
        whole=(f"{FAKE}<global-img>", FAKE),
        slice=(f"{FAKE}<row_{{row}}_col_{{column}}>", ""),
        row_end="\n",
        whole_last="\n\n",
    ),
    images=ImageSettings(passed=(("return_row_col_info", True),)),
)
