"""Tokenizers of the shape of other models: a part of Qwen's vocabulary, with their own special tokens."""

from collections.abc import Mapping
from typing import Any

import tokenizers
import transformers

from mmpack.demo.vocabulary import ranks_file, vocabulary_of

# how Qwen cuts a text before byte-pair encoding; GLM and Mistral cut alike but for runs of digits
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def byte_level_tokenizer(added: Mapping[int, str], size: int, first: int = 0, **named: str) -> Any:
    """A fast tokenizer of another model's shape: Qwen's commonest `size` tokens from id `first` on, and `added` ones.

    Args: `added`: id to text, special tokens. `named`: `eos_token=…`. The first takes seconds; raises as
    `qwen_tokenizer`.
    """
    vocabulary, merges = vocabulary_of(ranks_file())
    ids = {token: rank + first for token, rank in vocabulary.items() if rank < size}
    kept = [pair for pair in merges if "".join(pair) in ids]
    twins = {ids[text] for text in added.values() if text in ids}  # texts that Qwen has as well
    ids |= {text: i for i, text in added.items()} | {f"<|unused_{i}|>": i for i in sorted(twins)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=kept))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in added.values()]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", **named
    )
