"""A tokenizer by name or path, itself or as a function from ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from transformers import AutoTokenizer

from mmpack.adapters.transformers.load import loading


def load_tokenizer(name: str) -> Any:
    """transformers' tokenizer. Raises: ArgumentError if `name` can't be loaded."""
    with loading("--tokenizer", name, "a folder with a tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def load_decoder(name: str) -> Callable[[Sequence[int]], str]:
    """ids -> text: special tokens kept, spaces as they are, ids beyond the vocabulary as <id N>.

    Raises: ArgumentError if `name` can't be loaded.
    """
    tokenizer = load_tokenizer(name)
    known = len(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        out = []
        for has_text, run in groupby(map(int, ids), lambda i: i < known):
            if has_text:
                out.append(str(tokenizer.decode(list(run), clean_up_tokenization_spaces=False)))
            else:
                out += [f"<id {i}>" for i in run]
        return "".join(out)

    return decode
