"""A tokenizer of single bytes with special tokens at the ids that a family's vocabulary gives them; made at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmpack.errors import require
from mmpack.layout.token_text import byte_letters


def byte_tokenizer(special: Mapping[str, int], **named: Any) -> Any:
    """A fast tokenizer of transformers: ids 0 to 255 are bytes, `special` texts have their ids, between is nothing.

    Args: `named`: what transformers calls some of them, as in `pad_token="<|endoftext|>"`.
    Raises: MissingExtraError without tokenizers or transformers.
    """
    tokenizers = require("tokenizers", "smoke", "byte_tokenizer")
    transformers = require("transformers", "smoke", "byte_tokenizer")
    vocabulary = {letter: i for i, letter in enumerate(byte_letters().values())} | dict(special)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, padding_side="left", **named
    )
