"""A small tokenizer of Gemma's kind without a model hub: its special ids, its byte-pair rules, letters for words.

Ids of special tokens, runs of line breaks and blanks, and bytes are those of released checkpoints; what else a text
holds is a token per character, or several bytes.
"""

from __future__ import annotations

import string
from typing import Any

from mmpack.errors import require

_RUNS = 31  # the longest run of line breaks or blanks that is one token
_BREAKS, _BLANKS, _BYTES, _LETTERS = 107, 138, 238, 494
# the same in all Gemmas
_SPECIAL = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
GEMMA3 = {
    "<start_of_turn>": 105,
    "<end_of_turn>": 106,
    "<start_of_image>": 255999,
    "<end_of_image>": 256000,
    "<image_soft_token>": 262144,
}
GEMMA4 = {
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image>": 255999,
    "<|audio>": 256000,
    "<|image|>": 258880,
    "<|audio|>": 258881,
    "<image|>": 258882,
    "<audio|>": 258883,
    "<|video|>": 258884,
}
_NAMED_3 = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_NAMED_4 = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}


def gemma3_tokenizer() -> Any:
    """Of Gemma 3: ends turns with `<end_of_turn>`, pads on the left."""
    return _tokenizer(GEMMA3, _NAMED_3, "<end_of_turn>")


def gemma4_tokenizer() -> Any:
    """Of Gemma 4: ends turns with `<turn|>`, pads on the left."""
    return _tokenizer(GEMMA4, _NAMED_4, "<turn|>")


def _tokenizer(special: dict[str, int], named: dict[str, str], end: str) -> Any:
    tokenizers = require("tokenizers", "smoke", "gemma_vocabulary")
    transformers = require("transformers", "smoke", "gemma_vocabulary")
    vocabulary = _SPECIAL | special
    vocabulary |= {"\n" * n: _BREAKS + n - 1 for n in range(1, _RUNS + 1)}
    vocabulary |= {"▁" * n: _BLANKS + n - 2 for n in range(2, _RUNS + 1)}
    vocabulary |= {f"<0x{byte:02X}>": _BYTES + byte for byte in range(256)}
    letters = "▁" + string.ascii_letters + string.digits + string.punctuation
    vocabulary |= {letter: _LETTERS + i for i, letter in enumerate(letters)}
    merges = [
        (sign * a, sign * (n - a))
        for n in range(2, _RUNS + 1)
        for sign in "\n▁"
        for a in range(1, n)
    ]
    return transformers.GemmaTokenizer(
        vocab=vocabulary,
        merges=merges,
        added_tokens_decoder={
            i: tokenizers.AddedToken(text, special=True, normalized=False)
            for text, i in (_SPECIAL | special).items()
        },
        extra_special_tokens=named,
        eos_token=end,
        padding_side="left",
    )
