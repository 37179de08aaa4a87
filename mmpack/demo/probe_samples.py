"""Drawn samples for `mmpack probe` where no trace is given: pictures, a clip, a shared prompt and plain text.

Pixels are noise that follows from the medium's key: what a probe compares is two ways to compute, not what is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mmpack.demo.tiny_models import MODELS
from mmpack.errors import check_name
from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

Grid = tuple[int, int, int]
TEXT_IDS = 100_000  # drawn ids are below it
IMAGE, OTHER, CLIP = (1, 4, 6), (1, 8, 4), (2, 4, 4)


def probe_samples(family: str) -> list[Sample]:
    """Four samples of a family that `tiny_model` has, whose media hold drawn pixels.

    Raises: LayoutError (MM006) for an unknown family; ArgumentError for one without a tiny model.
    """
    about = get_family(family)
    check_name("probe_samples", "family", about.name, MODELS)
    random = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        return [int(i) for i in random.integers(0, TEXT_IDS, count)]

    picture, clip, other = (
        medium_of(about, name, kind, grid)
        for name, kind, grid in (
            ("a", "image", IMAGE),
            ("b", "video", CLIP),
            ("c", "image", OTHER),
        )
    )
    prompt: list[Any] = [text(5), picture, text(4)]
    drawn = [
        ("picture", prompt, text(6)),
        ("picture", prompt, text(4)),
        ("clip", [text(3), clip, text(3), other], text(5)),
        ("text", [text(6)], text(4)),
    ]
    samples = [
        _sample(about, f"{group}/{k}", group, parts, response)
        for k, (group, parts, response) in enumerate(drawn)
    ]
    draw_pixels(samples)
    return samples


def _sample(
    family: Family, sample_id: str, group: str, parts: list[Any], response: list[int]
) -> Sample:
    """`parts`: ids of text, and media."""
    ids: list[int] = []
    media: list[Medium] = []
    spans: list[ModalitySpan] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        start = len(ids)
        ids += written_with_markers(family, part.modality, part.grid_thw)
        spans += placeholder_spans(ids, start, family, part.modality, len(media))
        media.append(part)
    loss = [LossSpan(len(ids), len(ids) + len(response), "response")]
    array = np.array(ids + response, dtype=np.int64)
    return Sample(sample_id, group, family.name, array, media, spans, loss)


def written_with_markers(family: Family, modality: str, grid: Grid) -> list[int]:
    """Each run of placeholders between the vision marks; a time as text before each run of a video that has several."""
    runs = family.spans_of(modality, grid)
    run = [family.placeholder_ids[modality]] * (family.vision_tokens(grid) // runs)
    ids: list[int] = []
    for frame in range(runs):
        if modality == "video" and family.video_layout == "frames":
            ids += [27, 15 + frame, 13, 20, 6486, 29]  # <k.5 seconds>
        ids += [*family.starts, *run, *family.ends]
    return ids


def medium_of(family: Family, name: str, kind: str, grid: Grid) -> Medium:
    """Equal names and grids give equal keys; a clip's temporal patches are a second apart."""
    content = hashlib.sha256(f"{name} {kind} {family.name}".encode()).hexdigest()
    (t, h, w), size, tokens = grid, None, None
    if family.tokens_by_size is not None:  # the whole, and one row of tiles
        size = (max(t - 1, 1) * w * family.patch_size, h * family.patch_size)
        tokens = family.tokens_by_size(size[::-1], h, size[1], [size[::-1]])
    return Medium(
        media_id=name,
        modality=kind,
        cache_key=cache_key(content, grid, {}),
        grid_thw=grid,
        num_tokens=family.tokens_of(kind, grid) if tokens is None else tokens,
        size=size,
        content_hash=content,
        second_per_grid_ts=1.0 if kind == "video" else None,
    )


def draw_pixels(samples: Iterable[Sample]) -> int:
    """Give every medium without pixels normal noise that follows from its cache key; how many got some."""
    count = 0
    for sample in samples:
        family = get_family(sample.family)
        for medium in sample.media:
            if medium.pixel_values is None:
                seed = int.from_bytes(
                    hashlib.sha256(medium.cache_key.encode()).digest()[:8], "little"
                )
                shape = family.pixel_shape(medium.grid_thw, medium.modality)
                medium.pixel_values = np.random.default_rng(seed).standard_normal(shape, np.float32)
                count += 1
    return count


def placeholder_spans(
    ids: list[int], start: int, family: Family, kind: str, index: int
) -> list[ModalitySpan]:
    """The runs of placeholders from `start` on, numbered where the family numbers them."""
    held = np.isin(ids[start:], list(family.placeholder_ids.values())).astype(np.int8)
    edges = np.flatnonzero(np.diff(held, prepend=0, append=0)) + start
    pieces = family.in_pieces(kind)
    return [
        ModalitySpan(int(a), int(b), kind, index, k if pieces else None)
        for k, (a, b) in enumerate(edges.reshape(-1, 2))
    ]
