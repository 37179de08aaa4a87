"""Small, seeded, randomly initialised Qwen-VLs with the full vocabulary and a real vision tower; configs as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmpack.errors import check_name, require

if TYPE_CHECKING:
    import torch

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


def rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    values = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    return {"rope_parameters": values | more}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def whole(text: dict[str, Any], vision: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Arguments of a config of a text and a vision part, embeddings tied."""
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **rest}


QWEN2_TEXT = without(TEXT, "head_dim") | rope(1e6, [4, 6, 6])
QWEN3_TEXT = (
    without(TEXT, "bos_token_id", "eos_token_id")
    | rope(5e6, [6, 5, 5], mrope_interleaved=True)
    | {"num_hidden_layers": 4}
)
DEEP_TOWER = TOWER | {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
# family → prefix of transformers' classes, arguments of the config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        # the tower's own width is `embed_dim`, that of its output `hidden_size`
        whole(
            QWEN2_TEXT,
            {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
        ),
    ),
    # a block with windows and one without, two positions per second
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        whole(QWEN2_TEXT, TOWER | {"fullatt_block_indexes": [1], "tokens_per_second": 2}),
    ),
    # deepstack from three blocks of the tower into the first three layers
    "qwen3_vl": ("Qwen3VL", whole(QWEN3_TEXT, DEEP_TOWER)),
    "qwen3_vl_moe": ("Qwen3VLMoe", whole(QWEN3_TEXT | EXPERTS, DEEP_TOWER)),
}


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
    """About 20 M parameters (hidden 128, tied embeddings), in eval mode, on the CPU; float32 if no dtype is given.

    `family`: qwen2_vl, qwen2_5_vl, qwen3_vl or qwen3_vl_moe. Raises: ArgumentError for another one.
    """
    check_name("tiny_model", "family", family, MODELS)
    torch = require("torch", "torch", "tiny_model")
    transformers = require("transformers", "hf", "tiny_model")
    prefix, config = MODELS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, f"{prefix}ForConditionalGeneration")(
            getattr(transformers, f"{prefix}Config")(**config)
        )
    return made.to(torch.float32 if dtype is None else dtype).eval()
