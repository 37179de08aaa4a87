"""Samples with every field and pixels; the pixels of a medium are one array."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.samples import full_sample


def pictured(count: int = 3) -> list[Any]:
    made = [full_sample(f"s{i}", seed=i) for i in range(count)]
    rng, store = np.random.default_rng(0), {}
    for sample in made:
        for medium in sample.media:
            size = (medium.num_patches, 1176)
            medium.pixel_values = store.setdefault(medium.cache_key, rng.random(size, np.float32))
    return made
