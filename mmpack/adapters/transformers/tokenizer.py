"""A tokenizer by name or path, as a function from ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from transformers import AutoTokenizer

from mmpack.errors import ArgumentError


def load_decoder(name: str) -> Callable[[Sequence[int]], str]:
    """ids -> text: special tokens kept, spaces as they are, ids beyond the vocabulary as <id N>.

    Raises: ArgumentError if `name` can't be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # many libraries read a tokenizer, each with errors of its own
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArgumentError(
            f"--tokenizer: {name!r:.200} can't be loaded ({type(error).__name__}: {reason}). "
            "Fix: a folder with a tokenizer, or a hub name"
        ) from None

    known = len(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        out = []
        for inside, run in groupby(map(int, ids), lambda i: i < known):
            if inside:
                out.append(str(tokenizer.decode(list(run), clean_up_tokenization_spaces=False)))
            else:
                out += [f"<id {i}>" for i in run]
        return "".join(out)

    return decode
