"""A transformers processor of InternVL3 without a model hub: Qwen's tokenizer with InternVL's tokens, Pillow."""

from __future__ import annotations

from typing import Any

from mmpack.errors import needs, require

with needs("smoke", __name__):
    import transformers

from support.replicas.chat_templates import INTERNVL
from support.replicas.without_torchvision import hf_processor

from mmpack.demo.vocabulary import qwen_tokenizer

TOKENS = (  # ids from 151665 on
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<video>",
)
_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def internvl_processor(*, tile: int = 448, max_tiles: int = 12, tokenizer: Any = None) -> Any:
    """The processor of InternVL3, with its chat template. Takes some seconds.

    Args: `tile`: side of a tile in pixels. `max_tiles`: of one image, without its thumbnail. `tokenizer`:
    `internvl_tokenizer()` if not given.
    Raises: MissingExtraError without dashscope.
    """
    settings: Any = {
        "size": {"height": tile, "width": tile},
        "max_patches": max_tiles,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return hf_processor(
        "InternVLProcessor",
        lambda: transformers.InternVLVideoProcessor(),
        image_processor=transformers.GotOcr2ImageProcessorPil(**settings),
        tokenizer=internvl_tokenizer() if tokenizer is None else tokenizer,
        image_seq_length=(tile // 28) ** 2,
        chat_template=INTERNVL,
    )


def internvl_tokenizer() -> Any:
    """Qwen2.5's vocabulary and InternVL's tokens after it."""
    added = require("tokenizers", "smoke", "internvl_tokenizer").AddedToken
    qwen = qwen_tokenizer()
    qwen.add_tokens([added(token, special=True, normalized=False) for token in TOKENS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=qwen.backend_tokenizer,
        extra_special_tokens=_NAMED,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    )
