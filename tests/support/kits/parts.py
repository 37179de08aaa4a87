"""Parts of tiny configs that several families share: hidden 128, two layers, Qwen's vocabulary, two tower blocks."""

from __future__ import annotations

from mmpack.demo.tiny_models import EXPERTS, TEXT, TOWER, VOCAB_SIZE, rope, whole, without

__all__ = ["EXPERTS", "HALF", "NARROW", "TEXT", "TOWER", "VOCAB_SIZE", "rope", "whole", "without"]
HALF = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NARROW = {"text_config": HALF, "vision_config": {"out_hidden_size": 64}}
