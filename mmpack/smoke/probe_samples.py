"""Drawn samples for `mmpack probe` where no trace is given: pictures, a clip, a shared prompt and plain text.

Pixels are noise that follows from the medium's key: what a probe compares is two ways to compute, not what is seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.families import get_family
from mmpack.schema.sample import Sample
from mmpack.smoke.kits import get_kit
from mmpack.smoke.kits.samples import draw_pixels, sample_of

__all__ = ["draw_pixels", "probe_samples"]


def probe_samples(family: str, seed: int = 0) -> list[Sample]:
    """Four samples of a family, whose media hold drawn pixels.

    Raises: LayoutError (MM006) for an unknown family; ArgumentError for one without a kit.
    """
    kit = get_kit(get_family(family).name, "probe_samples")
    random = np.random.default_rng(seed)

    def text(count: int, kind: str = "text") -> tuple[str, Any]:
        return kind, random.integers(0, kit.text_ids, count)

    image = ("image", kit.image)
    clip = image if kit.video is None else ("video", kit.video)
    prompt = [text(5), (*image, "a"), text(4)]
    parts: list[list[Any]] = [
        [*prompt, text(6, "loss")],
        [*prompt, text(4, "loss")],
        [text(3), (*clip, "b"), text(3), ("image", kit.other, "c"), text(5, "loss")],
        [text(6), text(4, "loss")],
    ]
    groups = ("picture", "picture", "clip", "text")
    samples = [
        sample_of(kit, own, f"{group}/{k}", group)
        for k, (group, own) in enumerate(zip(groups, parts, strict=True))
    ]
    draw_pixels(samples)
    return samples
