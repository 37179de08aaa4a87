"""A transformers processor of MiniCPM-V 4.6 without a model hub: Qwen's text tokens, its own special ids, Pillow."""

from __future__ import annotations

import json
from typing import Any

from mmpack.errors import needs, require

with needs("smoke", __name__):
    import transformers

from support.replicas.chat_templates import MINICPM

from mmpack.demo.vocabulary import qwen_tokenizer

TOKENS = {  # ids; the markers of views stand where a vocabulary of 248,094 has room for them
    "<|endoftext|>": 248_044,
    "<|im_start|>": 248_045,
    "<|im_end|>": 248_046,
    "<|vision_start|>": 248_053,
    "<|vision_end|>": 248_054,
    "<|image_pad|>": 248_056,
    "<|video_pad|>": 248_057,
    "<image>": 248_078,
    "</image>": 248_079,
    "<slice>": 248_088,
    "</slice>": 248_089,
    "<image_id>": 248_090,
    "</image_id>": 248_091,
}
_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def minicpm_processor(*, view: int = 448, max_slices: int = 9, tokenizer: Any = None) -> Any:
    """The processor of MiniCPM-V 4.6, whose video processor needs torchvision. Takes some seconds.

    Args: `view`: about the side of a view in pixels. `max_slices`: of a picture beside its whole. `tokenizer`:
    `minicpm_tokenizer()` if not given.
    Raises: MissingExtraError without dashscope or torchvision.
    """
    require("torchvision", "hf", "minicpm_processor")
    settings: Any = {
        "scale_resolution": view,
        "max_slice_nums": max_slices,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return transformers.MiniCPMV4_6Processor(
        image_processor=transformers.MiniCPMV4_6ImageProcessorPil(**settings),
        video_processor=transformers.MiniCPMV4_6VideoProcessor(**settings),
        tokenizer=minicpm_tokenizer() if tokenizer is None else tokenizer,
        chat_template=MINICPM,
    )


def minicpm_tokenizer() -> Any:
    """Qwen2.5's text tokens under their own ids, and MiniCPM's special tokens."""
    tokenizers = require("tokenizers", "smoke", "minicpm_tokenizer")
    whole = json.loads(qwen_tokenizer().backend_tokenizer.to_str())
    vocabulary = whole["model"]["vocab"]
    first = len(vocabulary)
    named = {i: name for name, i in TOKENS.items()}
    vocabulary |= {named.get(i, f"<|unused_{i}|>"): i for i in range(first, max(named) + 1)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole["added_tokens"] = [
        {"id": i, "content": name, "special": True, **special} for i, name in sorted(named.items())
    ]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(whole)),
        extra_special_tokens=_NAMED,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    )
