"""The Qwen-VLs' processor in a kit: that of released checkpoints, for pictures of at most 24 vision tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from mmpack.families import get_family


@cache
def _tokenizer() -> Any:
    from mmpack.demo.vocabulary import qwen_tokenizer

    return qwen_tokenizer()


def processor(family: str, tokenizer: Any = None) -> Any:
    """The first without a tokenizer takes some seconds; those after it have the same one."""
    from mmpack.demo.qwen_processor import qwen_vl_processor

    about = get_family(family)
    token = (about.patch_size * about.spatial_merge_size) ** 2  # pixels of one vision token
    return qwen_vl_processor(
        family,
        min_pixels=4 * token,
        max_pixels=24 * token,
        tokenizer=_tokenizer() if tokenizer is None else tokenizer,
    )
