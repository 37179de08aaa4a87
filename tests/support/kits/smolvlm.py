"""SmolVLM: views of 128 pixels, four tokens each; Idefics3's processor over single bytes."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, Kit
from support.kits.byte_tokenizer import byte_tokenizer
from support.kits.parts import HALF, TEXT, whole

from mmpack.families import Family

SLICES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
NAMES = ["<global-img>", *SLICES, "<fake_token_around_image>", "<image>"]  # from 49152 on
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
SPECIAL |= {name: 49_152 + i for i, name in enumerate(NAMES)} | {"<end_of_utterance>": 49_279}
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}:"
    "{% if message.content is string %} {{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
MARKS = (SPECIAL["<fake_token_around_image>"], SPECIAL["<global-img>"])


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """One whole view."""
    return [*MARKS, *[family.image_token_id] * family.vision_tokens(grid), MARKS[0]]


def processor(tokenizer: Any = None) -> Any:
    """For pictures of at most 2 × 2 slices."""
    import transformers

    made = byte_tokenizer(SPECIAL, pad_token="<|im_end|>", eos_token="<end_of_utterance>")
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 256}, max_image_size={"longest_edge": 128}
        ),
        tokenizer=made if tokenizer is None else tokenizer,
        image_seq_len=4,
        chat_template=TEMPLATE,
    )


KIT = Kit(
    family="smolvlm",
    model_class="SmolVLMForConditionalGeneration",
    config_class="SmolVLMConfig",
    config=whole(
        TEXT
        | {"model_type": "llama", "vocab_size": 49_280}
        | {"bos_token_id": 1, "eos_token_id": 49_279, "pad_token_id": 2},
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": 128,
            "patch_size": 16,
        },
        scale_factor=4,
        image_token_id=49_190,
    ),
    narrow={"text_config": HALF},
    processor=processor,
    image=(1, 8, 8),
    other=(1, 8, 8),
    video=None,
    written=written,
    text_ids=49_000,
    lacks={
        "video": "a video is a series of images",
        "trl": "TRL's batches count tiles, which MmpackGRPO can't read",
        "verl": "the verl adapter writes patches, not tiles",
    },
)
