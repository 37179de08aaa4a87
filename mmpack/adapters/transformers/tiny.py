"""A small, seeded, randomly initialised Qwen2.5-VL with the full vocabulary and a real vision tower."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCAB_SIZE = 151_936  # Qwen2.5's embedding rows: the vocabulary, padded


def tiny_qwen2_5_vl(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """About 20 M parameters (hidden 128, 2 layers, tied embeddings), in eval mode, on the CPU."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "pad_token_id": 151643,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        tie_word_embeddings=True,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    torch.random.set_rng_state(state)
    return model.to(dtype).eval()
