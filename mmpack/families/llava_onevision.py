"""LLaVA-OneVision: a picture is its whole and tiles of 384 pixels; the tower cuts their padding and ends each line.

The number of tokens follows from the picture's size. Each picture is tiled, however many a sample has, as transformers
does where its processor is given a flat list. Positions count tokens; videos are not read.
"""

import math
from collections.abc import Sequence

from mmpack.families.base import Family, ImageSettings, Size

MOST_TILES = 9  # of "anyres_max_9": features of more are scaled down to as many


def picture_tokens(size: Size, side: int, tile: int, resolutions: Sequence[Size]) -> int:
    """Tokens of a picture: of its whole, and of its tiles without padding, with one more at the end of each line.

    As transformers' `LlavaOnevisionProcessor._get_number_of_features` counts them.
    """
    height, width = (length // tile * side for length in _best(size, resolutions))
    if size[1] / size[0] > width / height:
        height -= (height - int(round(size[0] * (width / size[1]), 7))) // 2 * 2
    else:
        width -= (width - int(round(size[1] * (height / size[0]), 7))) // 2 * 2
    ratio = math.sqrt(height * width / (MOST_TILES * side**2))
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return side**2 + height * (width + 1)


def _best(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most of a picture; of equal ones, the first that wastes least."""

    def worth(given: Size) -> tuple[int, int]:
        scale = min(given[1] / size[1], given[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - given[0] * given[1]

    return max(resolutions, key=worth)


LLAVA_ONEVISION = Family(
    name="llava_onevision",
    model_types=("llava_onevision",),
    processors=("LlavaOnevisionProcessor",),
    image_token_id=151646,
    pad_token_id=151643,
    turn_ids=(151644,),
    patch_size=14,
    spatial_merge_size=1,
    pixel_layout="tiles",
    tokens_by_size=picture_tokens,
    vocab_size=152_128,
    images=ImageSettings(
        fixed_of_processor=(
            ("vision_feature_select_strategy", "full"),
            ("vision_aspect_ratio", "anyres_max_9"),
        )
    ),
    unread=(("video", 151647),),
)
