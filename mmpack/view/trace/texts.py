"""The text of each token of a sample, as far as it is known, and as a page shows it.

Tokens have texts by a tokenizer, or by `metadata["token_texts"]`, a list of L strings. Else their ids stand for them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.layout.token_text import token_text
from mmpack.schema.sample import Sample

KEY = "token_texts"  # in `Sample.metadata`
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}


def texts_of(sample: Sample, tokenizer: Any) -> list[str] | None:
    """One text per token; "" where a token only continues a character. None where nothing gives a text."""
    if tokenizer is not None:
        found = token_text(sample.input_ids, tokenizer)
        # a character belongs to the token of its first byte
        bounds = np.searchsorted(found.token_of, np.arange(len(sample) + 1)).tolist()
        return [found.text[a:b] for a, b in pairwise(bounds)]
    recorded = sample.metadata.get(KEY)
    if isinstance(recorded, list) and len(recorded) == len(sample):
        return [text if isinstance(text, str) else str(text) for text in recorded]
    return None


@lru_cache(maxsize=1 << 16)
def visible(text: str) -> str:
    """Line ends as a sign and a line end, what can't be printed as its escape."""
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)
