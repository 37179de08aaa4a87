"""A transformers processor of GLM-4.1V, 4.5V or 4.6V without a hub: their special ids, Qwen's commonest tokens."""

from __future__ import annotations

from typing import Any

from mmpack.errors import check_name, needs

with needs("smoke", __name__):
    import transformers

from support.replicas.byte_level import byte_level_tokenizer
from support.replicas.chat_templates import GLM
from support.replicas.without_torchvision import hf_processor

from mmpack.families import get_family

BASE = 151_329  # tokens of text
TOKENS = (  # ids from 151329 on
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
_CLASSES = {"glm4v": "Glm4v", "glm4v_moe": "Glm4v", "glm46v": "Glm46V"}


def glm_processor(
    family: str = "glm4v",
    *,
    min_pixels: int = 112 * 112,
    max_pixels: int = 14 * 14 * 2 * 2 * 2 * 6144,
    tokenizer: Any = None,
) -> Any:
    """The processor of a released checkpoint of `family`: `glm4v`, `glm4v_moe` or `glm46v`.

    `min_pixels`, `max_pixels`: of a medium's whole volume, frames times area, where an image is two frames.
    Raises: ArgumentError for another family; MissingExtraError without dashscope.
    """
    check_name("glm_processor", "family", family, _CLASSES)
    prefix = _CLASSES[family]
    settings: Any = {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}
    return hf_processor(
        f"{prefix}Processor",
        lambda: getattr(transformers, f"{prefix}VideoProcessor")(**settings),
        image_processor=getattr(transformers, f"{prefix}ImageProcessorPil")(**settings),
        tokenizer=glm_tokenizer(family) if tokenizer is None else tokenizer,
        chat_template=GLM,
    )


def glm_tokenizer(family: str) -> Any:
    """Text up to id 151,328, then GLM's special tokens, with the family's ids of images and videos."""
    about = get_family(family)
    added = dict(enumerate(TOKENS, start=BASE))
    ids = about.prompt_ids
    added |= {ids["image"]: "<|image|>", ids["video"]: "<|video|>"}
    filler = {i: f"<|reserved_{i}|>" for i in range(BASE, max(added)) if i not in added}
    return byte_level_tokenizer(
        dict(sorted((added | filler).items())),
        BASE,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
