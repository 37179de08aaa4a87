"""Parts of tiny configs that several families share: hidden 128, two layers, Qwen's vocabulary, two tower blocks."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 151_936  # Qwen2.5's embedding rows: the vocabulary, padded
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HALF = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NARROW = {"text_config": HALF, "vision_config": {"out_hidden_size": 64}}


def rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    values = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    return {"rope_parameters": values | more}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def whole(text: dict[str, Any], vision: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Arguments of a config of a text and a vision part, embeddings tied."""
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **rest}
