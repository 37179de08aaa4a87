"""Prompts as an engine's renderer makes them, by transformers' own image processor: ids, hashes, ranges, pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.adapters.rendered import RenderedMedia

SIZES = [(56, 84), (112, 56), (84, 84)]  # height, width
PICTURES = [
    np.random.default_rng(k).integers(0, 256, (*size, 3), dtype=np.uint8)
    for k, size in enumerate(SIZES)
]


def rendered(
    hf: Any, numbers: list[int], words: int, sent: set[str]
) -> tuple[list[int], RenderedMedia]:
    """A prompt that shows PICTURES of `numbers`, with `words` ids after each; of those in `sent` only hashes.

    What it brings is added to `sent`.
    """
    start, stop, pad = hf.tokenizer.convert_tokens_to_ids(
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    )
    ids: list[int] = [11] * (1 + words)
    hashes, ranges, items = [], [], []
    for n in numbers:
        made = hf.image_processor(images=[PICTURES[n]], return_tensors="np")
        t, h, w = made["image_grid_thw"][0]
        count = int(t * h * w) // 4
        ranges.append((len(ids) + 1, count))
        ids += [start, *[pad] * count, stop, *[12] * words]
        hashes.append(f"hash-{n}")
        items.append(None if f"hash-{n}" in sent else dict(made))
    sent.update(hashes)
    if not numbers:
        return ids, RenderedMedia()
    return ids, RenderedMedia({"image": hashes}, {"image": ranges}, {"image": items})
