"""Gemma 4: pictures of at most 70 tokens; short windows with pictures that see themselves, and full attention."""

from __future__ import annotations

from typing import Any

from support.kits.base import Kit
from support.kits.parts import HALF, TEXT, whole

TEXT_CONFIG = TEXT | {
    "vocab_size": 262_144,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_bidirectional_attention": "vision",
    "global_head_dim": 64,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 2,
    "eos_token_id": 106,
    "pad_token_id": 0,
}


def processor(tokenizer: Any = None) -> Any:
    """Pictures and frames of at most 70 tokens."""
    from support.replicas.gemma_processor import gemma4_processor

    return gemma4_processor(max_soft_tokens=70, tokenizer=tokenizer)


def adjust(model: Any) -> None:
    """Queries smaller than their norm makes them: scores are not divided by the root of the head's size."""
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.fill_(0.3)


KIT = Kit(
    family="gemma4",
    heavy=True,
    model_class="Gemma4ForConditionalGeneration",
    config_class="Gemma4Config",
    config=whole(
        TEXT_CONFIG,
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "position_embedding_size": 256,
        },
    ),
    narrow={"text_config": HALF},
    processor=processor,
    image=(1, 3, 6),
    other=(1, 6, 6),
    video=(2, 3, 6),
    adjust=adjust,
    lacks={"verl": "the verl adapter writes patches, not lines of patches"},
)
