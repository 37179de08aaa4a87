"""The Qwen-VLs' processor in a kit: that of released checkpoints, for pictures of at most 24 vision tokens."""

from __future__ import annotations

from typing import Any

from mmpack.families import get_family


def processor(family: str, tokenizer: Any = None) -> Any:
    """Takes some seconds without a tokenizer."""
    from mmpack.smoke.qwen_processor import qwen_vl_processor

    about = get_family(family)
    token = (about.patch_size * about.spatial_merge_size) ** 2  # pixels of one vision token
    return qwen_vl_processor(
        family, min_pixels=4 * token, max_pixels=24 * token, tokenizer=tokenizer
    )
