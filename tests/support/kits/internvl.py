"""InternVL3: tiles of 56 pixels, four tokens each; a video is a series of images."""

from __future__ import annotations

from typing import Any

from support.kits.base import Kit
from support.kits.parts import HALF, TEXT, whole, without


def processor(tokenizer: Any = None) -> Any:
    """At most two tiles and a thumbnail per picture."""
    from support.replicas.internvl_processor import internvl_processor

    return internvl_processor(tile=56, max_tiles=2, tokenizer=tokenizer)


KIT = Kit(
    family="internvl",
    model_class="InternVLForConditionalGeneration",
    config_class="InternVLConfig",
    config=whole(
        without(TEXT, "head_dim") | {"model_type": "qwen2"},
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": [56, 56],
        },
        image_seq_length=4,
    ),
    narrow={"text_config": HALF},
    processor=processor,
    image=(1, 4, 4),
    other=(3, 4, 4),
    video=None,
    lacks={
        "video": "a video is a series of images",
        "trl": "TRL's batches count tiles, which MmpackGRPO can't read",
        "verl": "the verl adapter writes patches, not tiles",
    },
)
