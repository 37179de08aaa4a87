"""Small, seeded, randomly initialised models of every family, with the full vocabulary and a real vision tower."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from mmpack.errors import check_name

VOCAB_SIZE = 151_936  # Qwen2.5's embedding rows: the vocabulary, padded
_TEXT: dict[str, Any] = {
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
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """About 20 M parameters (hidden 128, tied embeddings; Qwen3.5 33 M), in eval mode, on the CPU.

    Raises: ArgumentError for a family that has no tiny model.
    """
    check_name("tiny_model", "family", family, _CONFIGS)
    name, text, vision, rest = _CONFIGS[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **rest
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    torch.random.set_rng_state(state)
    return model.to(dtype).eval()


def tiny_qwen2_5_vl(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """`tiny_model("qwen2_5_vl")`."""
    return tiny_model("qwen2_5_vl", seed, dtype)


def _rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    return {"rope_parameters": rope | more}


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


_QWEN2 = _without(_TEXT, "head_dim") | _rope(1e6, [4, 6, 6])
_QWEN3 = _without(_TEXT, "bos_token_id", "eos_token_id") | _rope(
    5e6, [6, 5, 5], mrope_interleaved=True
)
_DEEP = _TOWER | {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
_QWEN3_5 = (
    _TEXT
    | {"vocab_size": 248_320, "num_hidden_layers": 4}
    | {"bos_token_id": 248044, "eos_token_id": 248046, "pad_token_id": 248044}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | _rope(1e7, [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
)
# transformers' prefix of class names, text_config, vision_config, the rest
_CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        _QWEN2,
        {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _QWEN2,
        _TOWER | {"fullatt_block_indexes": [1], "tokens_per_second": 2},
        {},
    ),
    "qwen3_vl": ("Qwen3VL", _QWEN3 | {"num_hidden_layers": 4}, _DEEP, {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", _QWEN3 | {"num_hidden_layers": 4} | _EXPERTS, _DEEP, {}),
    "qwen3_5": ("Qwen3_5", _QWEN3_5, _TOWER, {}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _without(_QWEN3_5, "intermediate_size")
        | _EXPERTS
        | {"shared_expert_intermediate_size": 64},
        _TOWER,
        {},
    ),
    "internvl": (
        "InternVL",
        _without(_TEXT, "head_dim") | {"model_type": "qwen2"},
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": [56, 56],
        },
        {"image_seq_length": 4},
    ),
}
