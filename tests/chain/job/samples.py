"""The samples of the chain: pictures of noise through a real image processor, ids that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers

from mmpack.families import get_family
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.sample import Sample

_IDS = 150_000  # ids below the special ones


def draw(family: str, size: str, seed: int = 0) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Four samples by a real image processor with its cache, the same without, and companions with 0, 1 and 3 pictures.

    Two samples share a prompt with a picture, one has two pictures, one has none.
    """
    made = [_draw(wrap, family, size, seed) for wrap in (1 << 30, 0)]
    samples, companions = made[0]
    return samples, made[1][0], companions


def _draw(cache: int, name: str, size: str, seed: int) -> tuple[list[Sample], list[Sample]]:
    family, rng = get_family(name), np.random.default_rng(seed)
    processor = _processor(name, cache)
    text, side = (1, family.patch_size * 4) if size == "tiny" else (24, family.patch_size * 28)

    def ids(n: int) -> list[int]:
        return rng.integers(0, _IDS, n * text).tolist()

    def picture(w: int, h: int) -> np.ndarray:
        return rng.integers(0, 256, (side * h // 2, side * w // 2, 3), dtype=np.uint8)

    def sample(sample_id: str, parts: list[Any], n: int, group: str) -> Sample:
        """`parts`: ids or pictures."""
        out: list[int] = []
        for part in parts:
            if isinstance(part, list):
                out += part
            else:
                placeholder = family.placeholder_ids["image"]
                out += [*family.starts, placeholder, *family.ends]
        media = [part for part in parts if not isinstance(part, list)]
        return processor.from_ids(
            out + ids(n),
            media=media,
            expanded=False,
            loss_spans=[(len(out), len(out) + n * text)],
            sample_id=sample_id,
            group_id=group,
        )

    prompt = [ids(6), picture(3, 2), ids(4)]
    samples = [
        sample("a0", prompt, 5, "a"),
        sample("a1", prompt, 8, "a"),
        sample("b0", [ids(5), picture(2, 2), ids(3), picture(4, 2), ids(2)], 6, "b"),
        sample("c0", [ids(9)], 7, "c"),
    ]
    companions = [
        sample("d0", [ids(11)], 3, "d"),
        sample("d1", [ids(2), picture(5, 2), ids(3)], 4, "d"),
        sample("d3", [ids(3), picture(2, 3), ids(1), picture(2, 2), picture(3, 2)], 2, "d"),
    ]
    return samples, companions


def _processor(family: str, cache_bytes: int) -> Processor:
    """Released image settings and a tokenizer of one word: ids are drawn, no text is read."""
    from tokenizers import Tokenizer, models

    settings: dict[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 28 * 28}}
    if get_family(family).patch_size == 16:
        half = [0.5, 0.5, 0.5]
        settings |= {"patch_size": 16, "image_mean": half, "image_std": half}
    return wrap_processor(
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        ),
        image_processor=transformers.Qwen2VLImageProcessorPil(**settings),
        family=family,
        cache_bytes=cache_bytes,
    )
