"""Drawn samples for `mmpack probe` where no trace is given: pictures, a clip, a shared prompt and plain text.

Pixels are noise that follows from the medium's key: what a probe compares is two ways to compute, not what is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

TEXT_IDS = 100_000  # ids below it are text in every vocabulary


def probe_samples(family: str, seed: int = 0) -> list[Sample]:
    """Four samples of a family, whose media hold drawn pixels. Raises: LayoutError (MM006) for an unknown family."""
    about = get_family(family)
    random = np.random.default_rng(seed)
    tiles = about.pixel_layout == "tiles"
    one, two = ((1, 4, 4), (2, 4, 4)) if tiles else ((1, 4, 6), (1, 8, 4))
    clip = ("video", (2, 4, 4)) if about.video_token_id is not None else ("image", one)
    prompt = [_text(random, 5), ("image", one, "a"), _text(random, 4)]
    parts: list[list[Any]] = [
        [*prompt, _text(random, 6, True)],
        [*prompt, _text(random, 4, True)],
        [_text(random, 3), (*clip, "b"), _text(random, 3), ("image", two, "c"), _text(random, 5, True)],
        [_text(random, 6), _text(random, 4, True)],
    ]  # fmt: skip
    groups = ("picture", "picture", "clip", "text")
    samples = [
        _sample(f"{group}/{k}", group, about, own)
        for k, (group, own) in enumerate(zip(groups, parts, strict=True))
    ]
    draw_pixels(samples)
    return samples


def draw_pixels(samples: Iterable[Sample]) -> int:
    """Give every medium without pixels normal noise that follows from its cache key; how many got some."""
    count = 0
    for sample in samples:
        width = get_family(sample.family).patch_dim
        for medium in sample.media:
            if medium.pixel_values is None:
                seed = int.from_bytes(
                    hashlib.sha256(medium.cache_key.encode()).digest()[:8], "little"
                )
                shape = (medium.num_patches, width)
                medium.pixel_values = np.random.default_rng(seed).standard_normal(shape, np.float32)
                count += 1
    return count


def _text(random: np.random.Generator, count: int, loss: bool = False) -> tuple[str, list[int]]:
    return "loss" if loss else "text", random.integers(0, TEXT_IDS, count).tolist()


def _sample(sample_id: str, group: str, family: Family, parts: list[Any]) -> Sample:
    ids: list[int] = []
    media: list[Medium] = []
    spans, loss = [], []
    for kind, what, *name in parts:
        start = len(ids)
        if kind not in ("image", "video"):
            ids += what
            if kind == "loss":
                loss.append(LossSpan(start, len(ids)))
            continue
        medium = _medium(name[0], what, kind, family)
        runs = family.spans_of(kind, what)
        for k in range(runs):
            frame = k if runs > 1 else None
            ids.append(family.vision_start_id)
            begin = len(ids)
            ids += [family.placeholder_ids[kind]] * (medium.num_tokens // runs)
            spans.append(ModalitySpan(begin, len(ids), kind, len(media), frame))
            ids.append(family.vision_end_id)
        media.append(medium)
    return Sample(sample_id, group, family.name, np.array(ids), media, spans, loss)


def _medium(name: str, grid: tuple[int, int, int], kind: str, family: Family) -> Medium:
    content = hashlib.sha256(f"{name} {kind} {family.name}".encode()).hexdigest()
    medium = Medium(
        media_id=name,
        modality=kind,
        cache_key=cache_key(content, grid, {}),
        grid_thw=grid,
        num_tokens=family.vision_tokens(grid),
        content_hash=content,
    )
    if kind == "video":
        medium.second_per_grid_ts = 1.0
    return medium
