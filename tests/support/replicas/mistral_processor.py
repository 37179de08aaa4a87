"""A transformers processor of Mistral 3 without a model hub: its special ids, Qwen's commonest tokens, Pillow."""

from __future__ import annotations

from typing import Any

from mmpack.errors import needs

with needs("smoke", __name__):
    import transformers
    from transformers.utils.import_utils import is_torchvision_available

from support.replicas.byte_level import byte_level_tokenizer
from support.replicas.chat_templates import MISTRAL
from support.replicas.without_torchvision import WITHOUT_TORCHVISION

SPECIAL = 1000  # ids below it
TOKENS = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
}


def mistral3_processor(*, longest_edge: int = 1540, tokenizer: Any = None) -> Any:
    """The processor of Mistral Small 3.1. `longest_edge`: of a resized picture, in pixels.

    Raises: MissingExtraError without dashscope.
    """
    classes: Any = transformers if is_torchvision_available() else None
    kind = WITHOUT_TORCHVISION["PixtralProcessor"] if classes is None else classes.PixtralProcessor
    return kind(
        image_processor=transformers.PixtralImageProcessorPil(
            size={"longest_edge": longest_edge}, patch_size=14
        ),
        tokenizer=mistral3_tokenizer() if tokenizer is None else tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=MISTRAL,
    )


def mistral3_tokenizer() -> Any:
    """Special tokens up to id 999, then 130,072 of text."""
    added = {i: TOKENS.get(i, f"<SPECIAL_{i}>") for i in range(SPECIAL)}
    return byte_level_tokenizer(
        added, 131_072 - SPECIAL, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
