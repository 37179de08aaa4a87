"""Qwen3.5: three layers of linear attention and one of full attention; 33 M parameters, for its vocabulary."""

from __future__ import annotations

from typing import Any

from support.kits.base import Kit
from support.kits.parts import NARROW, TEXT, TOWER, rope, whole

TEXT_CONFIG = (
    TEXT
    | {"vocab_size": 248_320, "num_hidden_layers": 4}
    | {"bos_token_id": 248044, "eos_token_id": 248046, "pad_token_id": 248044}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | rope(1e7, [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
)
SPECIAL = {
    "<|endoftext|>": 248044,
    "<|im_start|>": 248045,
    "<|im_end|>": 248046,
    "<|vision_start|>": 248053,
    "<|vision_end|>": 248054,
    "<|image_pad|>": 248056,
    "<|video_pad|>": 248057,
}


def processor(tokenizer: Any = None) -> Any:
    """Qwen3-VL's, with ids of Qwen3.5; text is bytes, for its vocabulary is in no package."""
    from support.kits import qwen
    from support.kits.byte_tokenizer import byte_tokenizer

    if tokenizer is None:
        named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        tokenizer = byte_tokenizer(SPECIAL, **named)
    return qwen.processor("qwen3_vl", tokenizer)


KIT = Kit(
    family="qwen3_5",
    model_class="Qwen3_5ForConditionalGeneration",
    config_class="Qwen3_5Config",
    config=whole(TEXT_CONFIG, TOWER),
    narrow=NARROW,
    processor=processor,
)
