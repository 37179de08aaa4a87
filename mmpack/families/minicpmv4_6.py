"""MiniCPM-V 4.6: Qwen3.5's text model, positions that count tokens; a picture is its whole and up to nine slices.

Start and end of a view are tokens of the tokenizer's own (<image>, <slice>, …), so the ids of Qwen3.5's are never
written. A frame of a video is a view; frames that are cut into slices have no layout here.
"""

from dataclasses import replace

from mmpack.families.base import ImageSettings, Views
from mmpack.families.qwen3_5 import QWEN3_5

MINICPMV4_6 = replace(
    QWEN3_5,
    name="minicpmv4_6",
    model_types=("minicpmv4_6",),
    processors=("MiniCPMV4_6Processor",),
    patch_size=14,
    temporal_patch_size=1,
    # in the tower and behind it, two each
    spatial_merge_size=4,
    position_rules=("count",),
    pixel_layout="strip",
    vocab_size=248_094,
    views=Views(
        whole=("<image>", "</image>"),
        slice=("<slice>", "</slice>"),
        row_end="\n",
        number=("<image_id>", "</image_id>"),
    ),
    images=ImageSettings(fixed=(("downsample_mode", "16x"),)),
    oldest_transformers="5.19",  # before, its tower merges views of one size only
    video=None,
)
