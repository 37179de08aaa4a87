"""Gemma 3: squares of 112 pixels, four tokens each; three layers of a short window and one of full attention."""

from __future__ import annotations

from typing import Any

from support.kits.base import Kit
from support.kits.parts import HALF, TEXT, whole

TEXT_CONFIG = TEXT | {
    "vocab_size": 262_208,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "bos_token_id": 2,
    "eos_token_id": 106,
    "pad_token_id": 0,
}


def processor(tokenizer: Any = None) -> Any:
    """Of squares of 112 pixels."""
    from support.replicas.gemma_processor import gemma3_processor

    return gemma3_processor(side=112, tokenizer=tokenizer)


def adjust(model: Any) -> None:
    """The projector's weight, which transformers makes zero: pictures would be nothing."""
    model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.1)


KIT = Kit(
    family="gemma3",
    model_class="Gemma3ForConditionalGeneration",
    config_class="Gemma3Config",
    config=whole(
        TEXT_CONFIG,
        {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
    ),
    narrow={"text_config": HALF},
    processor=processor,
    spread=2.0,
    image=(1, 8, 8),
    other=(3, 8, 8),
    video=None,
    adjust=adjust,
    lacks={
        "video": "a video is a series of images",
        "verl": "the verl adapter writes patches, not tiles",
    },
)
