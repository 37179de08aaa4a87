"""MiniCPM-V 4.6 over Qwen3.5's layers, two of linear attention and one of full; views of 4 × 4 patches and more."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, Kit
from support.kits.parts import whole, without
from support.kits.qwen3_5 import TEXT_CONFIG

from mmpack.families import Family

IMAGE = (248_078, 248_079)  # <image>, </image>, of the offline tokenizer


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """Each run between <image> and </image>."""
    runs = family.spans_of(modality, grid)
    run = [family.placeholder_ids[modality]] * (family.vision_tokens(grid) // runs)
    return [i for _ in range(runs) for i in (IMAGE[0], *run, IMAGE[1])]


def processor(tokenizer: Any = None) -> Any:
    """Views of about 64 pixels a side, at most four slices."""
    from support.replicas.minicpm_processor import minicpm_processor

    return minicpm_processor(view=64, max_slices=4, tokenizer=tokenizer)


KIT = Kit(
    family="minicpmv4_6",
    heavy=True,
    model_class="MiniCPMV4_6ForConditionalGeneration",
    config_class="MiniCPMV4_6Config",
    config=whole(
        without(TEXT_CONFIG, "rope_parameters")
        | {
            "model_type": "qwen3_5_text",
            "vocab_size": 248_094,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
            },
        },
        {
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
        },
        insert_layer_id=1,
        image_token_id=248_056,
        video_token_id=248_057,
    ),
    narrow={"text_config": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}},
    processor=processor,
    needs_torchvision=True,
    image=(1, 4, 8),
    other=(1, 8, 12),
    video=(2, 8, 4),
    written=written,
    lacks={
        "trl": "TRL passes no view sizes to the model",
        "verl": "the verl adapter writes patches, not strips of patches",
    },
)
