"""Mistral 3: a Pixtral tower, pictures as rows; no video."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, Kit
from support.kits.parts import HALF, TEXT, whole

from mmpack.families import Family


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """Rows of placeholders, each closed by the row's end, the last by the image's."""
    rows = family.spans_of(modality, grid)
    assert family.row_end_id is not None
    row = [family.image_token_id] * (family.vision_tokens(grid) // rows)
    return [*[*row, family.row_end_id] * (rows - 1), *row, *family.ends]


def processor(tokenizer: Any = None) -> Any:
    """For pictures of at most 112 pixels a side."""
    from support.replicas.mistral_processor import mistral3_processor

    return mistral3_processor(longest_edge=112, tokenizer=tokenizer)


KIT = Kit(
    family="mistral3",
    model_class="Mistral3ForConditionalGeneration",
    config_class="Mistral3Config",
    config=whole(
        TEXT
        | {"model_type": "mistral", "vocab_size": 131_072, "sliding_window": None}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11},
        {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 1540,
            "patch_size": 14,
        },
        image_token_index=10,
    ),
    narrow={"text_config": HALF},
    processor=processor,
    video=None,
    written=written,
    lacks={
        "verl": "the verl adapter writes patches, not tiles",
        "video": "a video is a series of images",
    },
    # else it makes tensors of what it is given, and TRL gives it prompts of unlike lengths unpadded
    for_trl={"text_kwargs": {}},
)
