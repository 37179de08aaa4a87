"""Batches of any family for the adapter's tests: images, videos (where the family has them), shared prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from support.kits import get_kit
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.schema.sample import Sample

# every way to lay samples out, by name
LAYOUTS: dict[str, Callable[[list[Sample]], Any]] = {
    "packed": lambda s: mp.pack(s),
    "packed, rounded up": lambda s: mp.pack(s, pad_to_multiple_of=64),
    "shared": lambda s: mp.pack(s, share_prefix=True),
    "shared, rounded up": lambda s: mp.pack(s, share_prefix=True, pad_to_multiple_of=64),
    "left": lambda s: mp.pad(s, side="left"),
    "right": lambda s: mp.pad(s, side="right", pad_to_multiple_of=16),
}


# One of each kind of layout; the others are slow.
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "gemma3")


def some_slow(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: those of `QUICK` as they are, the other families marked slow."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def mixed_batch(name: str) -> list[Sample]:
    """Five samples: three that branch off one prompt at two depths, a video, an image that comes twice, and text."""
    kit = get_kit(name)
    rng = np.random.default_rng(3)
    ids = min(151643, kit.about.vocab_size)

    def text(n: int) -> tuple[Any, ...]:
        return "text", rng.integers(0, ids, n)

    def response(n: int, turn: int | None = None) -> tuple[Any, ...]:
        return "response", rng.integers(0, ids, n), turn

    image, other = ("image", kit.image, "x"), ("image", kit.other, "y")
    video = ("video", kit.video, "f") if kit.video else ("image", kit.image, "z")
    prompt, end = [text(5), image, text(3)], response(4)
    parts = [
        [*prompt, end, text(2), other, response(3, 1)],
        [*prompt, end, text(2), response(2, 1)],
        [*prompt, response(2), video, response(2, 1)],
        [text(5), video, image, text(2), response(3)],
        [text(5), response(3)],
    ]
    return with_pixels([make_sample(p, f"s{i}", family=name) for i, p in enumerate(parts)])
