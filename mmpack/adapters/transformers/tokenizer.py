"""A tokenizer by name or path, as a function from ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import AutoTokenizer

from mmpack.errors import ArgumentError


def load_decoder(name: str) -> Callable[[Sequence[int]], str]:
    """ids -> text, special tokens kept, spaces as they are. Raises ArgumentError if `name` can't be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # many libraries read a tokenizer, each with errors of its own
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArgumentError(
            f"--tokenizer: {name!r:.200} can't be loaded ({type(error).__name__}: {reason}). "
            "Fix: a folder with a tokenizer, or a hub name"
        ) from None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return decode
