"""Kimi K2.5 with eight experts, heads of 24 for queries and keys and 16 for values, a tower of two blocks."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, Kit
from support.kits.parts import whole

from mmpack.families import Family

BEGIN, CONTENT, END = 163_602, 163_603, 163_604  # <|media_begin|> and so on


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """Each run after the start, one id for `image` or `video`, and <|media_content|>; before a video's its time."""
    runs = family.spans_of(modality, grid)
    run = [family.placeholder_ids[modality]] * (family.vision_tokens(grid) // runs)
    ids: list[int] = []
    for k in range(runs):
        if modality == "video":
            ids += [410, 25, 410, 25, 2620 + k, 13, 1302]
        ids += [BEGIN, 18647, CONTENT, *run, END]
    return ids


def processor(tokenizer: Any = None) -> Any:
    """At most 16 patches a side."""
    from support.replicas.kimi_processor import kimi_processor

    return kimi_processor(max_side=16, tokenizer=tokenizer)


KIT = Kit(
    family="kimi_k25",
    heavy=True,
    model_class="Kimi_K25ForConditionalGeneration",
    config_class="Kimi_K25Config",
    config=whole(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 163_968,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_mtp_layers": 0,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
            "bos_token_id": 163_584,
            "eos_token_id": 163_586,
            "pad_token_id": 163_839,
        },
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        projection_hidden_size=64,
    ),
    narrow={"text_config": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}},
    video=None,
    processor=processor,
    needs_torchvision=True,
    written=written,
    text_ids=160_000,
    spread=2.0,
    lacks={
        "video": "transformers' own forward can't encode one; packed videos have separate tests",
        "trl": "stock TRL passes crop_to_patches to its image processor, which refuses it",
        "verl": "verl 0.9's transformers lacks this model",
    },
)
