"""Batches of any family for the adapter's tests: images, videos (where the family has them), shared prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.models import with_pixels
from support.samples import make_sample

from mmpack.families import get_family
from mmpack.schema.sample import Sample


def mixed_batch(name: str) -> list[Sample]:
    """Five samples: three that branch off one prompt at two depths, a video, a picture that comes twice, and text."""
    family = get_family(name)
    rng = np.random.default_rng(3)

    def text(n: int) -> tuple[Any, ...]:
        return "text", rng.integers(0, 151643, n)

    def response(n: int, turn: int | None = None) -> tuple[Any, ...]:
        return "response", rng.integers(0, 151643, n), turn

    tiles = family.pixel_layout == "tiles"  # all of one size
    image = ("image", (1, 4, 4) if tiles else (1, 4, 6), "x")
    other = ("image", (3, 4, 4) if tiles else (1, 8, 4), "y")
    film = ("video", (2, 4, 4), "f") if family.video_token_id else ("image", (1, 4, 4), "z")
    prompt, end = [text(5), image, text(3)], response(4)
    parts = [
        [*prompt, end, text(2), other, response(3, 1)],
        [*prompt, end, text(2), response(2, 1)],
        [*prompt, response(2), film, response(2, 1)],
        [text(5), film, image, text(2), response(3)],
        [text(5), response(3)],
    ]
    return with_pixels([make_sample(p, f"s{i}", family=name) for i, p in enumerate(parts)])
