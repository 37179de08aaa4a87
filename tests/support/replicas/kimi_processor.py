"""A transformers processor of Kimi K2.5 without a model hub: Qwen's text tokens, Kimi's special ids, torchvision."""

from __future__ import annotations

import json
from typing import Any

from mmpack.errors import needs, require

with needs("smoke", __name__):
    import transformers

from support.replicas.chat_templates import KIMI_K25

from mmpack.demo.vocabulary import qwen_tokenizer

FIRST = 163_584  # of the special ids; below it text tokens, and names that no text has
TOKENS = {  # from FIRST on; what is not named stays reserved
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
    256: "<|kimi_k25_video_placeholder|>",
}


def kimi_processor(*, max_side: int = 512, max_patches: int = 16_384, tokenizer: Any = None) -> Any:
    """The processor of Kimi K2.5, whose image processor needs torchvision. Takes some seconds without a tokenizer.

    Args: `max_side`: patches of a picture's longer side. `max_patches`: of a whole picture. `tokenizer`:
    `kimi_tokenizer()` if not given.
    Raises: MissingExtraError without dashscope or torchvision.
    """
    require("torchvision", "hf", "kimi_processor")
    settings: Any = {
        "size": {"max_height": max_side, "max_width": max_side},
        "max_patches": max_patches,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return transformers.Kimi_K25Processor(
        image_processor=transformers.Kimi_K25ImageProcessor(**settings),
        video_processor=transformers.Kimi_K25VideoProcessor(**settings),
        tokenizer=kimi_tokenizer() if tokenizer is None else tokenizer,
        chat_template=KIMI_K25,
    )


def kimi_tokenizer() -> Any:
    """Qwen2.5's text tokens under their own ids, and Kimi's special tokens under theirs."""
    tokenizers = require("tokenizers", "smoke", "kimi_tokenizer")
    whole = json.loads(qwen_tokenizer().backend_tokenizer.to_str())
    vocabulary = whole["model"]["vocab"]
    names = [TOKENS.get(i, f"<|reserved_token_{FIRST + i}|>") for i in range(max(TOKENS) + 1)]
    vocabulary |= {f"<|unused_{i}|>": i for i in range(len(vocabulary), FIRST)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole["added_tokens"] = [
        {"id": FIRST + i, "content": name, "special": True, **special}
        for i, name in enumerate(names)
    ]
    vocabulary |= {name: FIRST + i for i, name in enumerate(names)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(whole)),
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        unk_token="[UNK]",
        padding_side="left",
    )
