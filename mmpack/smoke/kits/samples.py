"""Samples out of parts, as a kit writes its family's media; pixels are noise that follows from the medium's key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan
from mmpack.smoke.kits.base import Grid, Kit


def sample_of(
    kit: Kit, parts: Sequence[tuple[Any, ...]], sample_id: str = "s0", group_id: str = "g0"
) -> Sample:
    """A valid sample out of parts, in order, its media without pixels.

    Parts: `("text", ids)`, `("loss", ids[, turn])`, `("image", grid, name)`, `("video", grid, name)`; a name that
    returns is the same medium. A loss part must not come first.
    """
    family = kit.about
    ids: list[int] = []
    media: dict[str, Medium] = {}
    spans: list[ModalitySpan] = []
    loss: list[LossSpan] = []
    for kind, what, *more in parts:
        start = len(ids)
        if kind in ("text", "loss"):
            ids += [int(i) for i in what]
            if kind == "loss":
                loss.append(LossSpan(start, len(ids), "response", more[0] if more else None))
            continue
        medium = media.setdefault(more[0], medium_of(family, more[0], kind, what))
        ids += kit.written(family, kind, medium.grid_thw)
        spans += placeholder_spans(ids, start, family, kind, list(media).index(more[0]))
    return Sample(
        sample_id,
        group_id,
        family.name,
        np.array(ids, dtype=np.int64),
        list(media.values()),
        spans,
        loss,
    )


def medium_of(family: Family, name: str, kind: str, grid: Grid) -> Medium:
    """Equal names and grids give equal keys; a clip's temporal patches are a second apart."""
    content = hashlib.sha256(f"{name} {kind} {family.name}".encode()).hexdigest()
    return Medium(
        media_id=name,
        modality=kind,
        cache_key=cache_key(content, grid, {}),
        grid_thw=grid,
        num_tokens=family.vision_tokens(grid),
        content_hash=content,
        second_per_grid_ts=1.0 if kind == "video" else None,
    )


def mixed_samples(kit: Kit, seed: int = 3) -> list[Sample]:
    """Five samples: three that branch off one prompt at two depths, a clip, a picture that comes twice, and text."""
    random = np.random.default_rng(seed)

    def text(count: int) -> tuple[Any, ...]:
        return "text", random.integers(0, kit.text_ids, count)

    def loss(count: int, turn: int | None = None) -> tuple[Any, ...]:
        return "loss", random.integers(0, kit.text_ids, count), turn

    image, other = ("image", kit.image, "x"), ("image", kit.other, "y")
    clip = ("image", kit.image, "z") if kit.video is None else ("video", kit.video, "f")
    prompt, end = [text(5), image, text(3)], loss(4)
    parts = [
        [*prompt, end, text(2), other, loss(3, 1)],
        [*prompt, end, text(2), loss(2, 1)],
        [*prompt, loss(2), clip, loss(2, 1)],
        [text(5), clip, image, text(2), loss(3)],
        [text(5), loss(3)],
    ]
    samples = [sample_of(kit, p, f"s{i}") for i, p in enumerate(parts)]
    draw_pixels(samples)
    return samples


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
                shape = family.pixel_shape(medium.grid_thw)
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
