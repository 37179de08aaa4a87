"""LLaVA-OneVision: tiles of 56 pixels, 16 tokens each; at most 3 × 3, and a processor over single bytes."""

from __future__ import annotations

from typing import Any

from support.kits.base import Grid, Kit
from support.kits.byte_tokenizer import byte_tokenizer
from support.kits.parts import HALF, TEXT, whole, without

from mmpack.demo.probe_samples import medium_of
from mmpack.families import Family

SIDES = (56, 112, 168)
RESOLUTIONS = [[height, width] for height in SIDES for width in SIDES]
SPECIAL = {
    name: 151_643 + i
    for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"))
}
LINE_BREAK = 198
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(family: Family, modality: str, grid: Grid) -> list[int]:
    """The placeholders and a line break: a row of tiles, each line of which ends in one more."""
    tokens = medium_of(family, "drawn", modality, grid).num_tokens
    return [*[family.image_token_id] * tokens, LINE_BREAK]


def processor(tokenizer: Any = None) -> Any:
    """transformers' own, without its video processor, which needs torchvision."""
    import transformers

    class LlavaOnevisionProcessor(transformers.LlavaOnevisionProcessor):
        num_image_tokens, vision_feature_select_strategy = 16, "full"
        image_token, image_token_id = "<image>", SPECIAL["<image>"]
        video_token, video_token_id = "<video>", SPECIAL["<video>"]
        vision_aspect_ratio = "anyres_max_9"

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
            parts = image_processor, tokenizer
            transformers.ProcessorMixin.__init__(self, *parts, chat_template=chat_template)

    made = byte_tokenizer(SPECIAL, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 56, "width": 56}, image_grid_pinpoints=RESOLUTIONS
    )
    return LlavaOnevisionProcessor(images, made if tokenizer is None else tokenizer, TEMPLATE)


KIT = Kit(
    family="llava_onevision",
    model_class="LlavaOnevisionForConditionalGeneration",
    config_class="LlavaOnevisionConfig",
    config=whole(
        without(TEXT, "head_dim") | {"model_type": "qwen2"},
        {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        image_grid_pinpoints=RESOLUTIONS,
    ),
    narrow={"text_config": HALF},
    processor=processor,
    spread=2.0,
    image=(2, 4, 4),
    other=(3, 4, 4),
    video=None,
    written=written,
    lacks={
        "video": "videos are not read",
        "trl": "TRL passes no sizes of pictures to the model",
        "verl": "the verl adapter writes patches, not tiles",
    },
)
