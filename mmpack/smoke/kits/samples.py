"""Samples out of parts, as a kit writes its family's media; pixels are noise that follows from the medium's key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.tmrope import interleaved
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan
from mmpack.smoke.kits.base import Grid, Kit


def sample_of(
    kit: Kit, parts: Sequence[tuple[Any, ...]], sample_id: str = "s0", group_id: str = "g0"
) -> Sample:
    """A valid sample out of parts, in order, its media without pixels.

    Parts: `("text", ids)`, `("loss", ids[, turn])`, `("image", grid, name)`, and as that `video` and `audio`;
    `("film", (grid, audio's grid), name)`, a video with its sound. A name that returns is the same medium. A loss part
    must not come first.
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
        if kind == "film":
            films = [(more[0], "video", what[0]), (f"{more[0]}'s sound", "audio", what[1])]
            own = [media.setdefault(n, medium_of(family, n, k, grid)) for n, k, grid in films]
            ids += film_ids(family, *own)
            spans += film_spans(ids, start, family, [list(media).index(m.media_id) for m in own])
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
        num_tokens=family.tokens_of(kind, grid),
        content_hash=content,
        second_per_grid_ts=1.0 if kind == "video" else None,
    )


def mixed_samples(kit: Kit, seed: int = 3) -> list[Sample]:
    """Five samples: three that branch off one prompt at two depths, a clip, a picture that comes twice, and text.

    Of a family that hears, four more: an audio, the same audio twice beside a picture, and two films.
    """
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
    if kit.audio is not None:
        heard = ("audio", kit.audio, "a")
        film = ("film", ((3, 4, 4), kit.audio), "v")
        parts += [[text(3), heard, text(2), loss(3)], [text(3), heard, image, heard, loss(2)]]
        parts += [[text(2), film, text(1), loss(2)], [text(2), film, heard, loss(2)]]
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


def film_ids(family: Family, video: Medium, sound: Medium) -> list[int]:
    """A video with its sound, whose placeholders lie in turns, between the marks of both."""
    audio = family.audio
    assert audio is not None and video.second_per_grid_ts is not None
    mine = interleaved(
        audio,
        video.grid_thw,
        family.spatial_merge_size,
        video.second_per_grid_ts,
        family.tokens_per_second or 1.0,
        sound.num_tokens,
    )
    run = np.where(mine, family.placeholder_ids["video"], audio.token_id).tolist()
    return [family.vision_start_id, audio.start_id, *run, audio.end_id, family.vision_end_id]


def film_spans(
    ids: list[int], start: int, family: Family, indices: list[int]
) -> list[ModalitySpan]:
    """The spans of `film_ids` from `start` on; `indices`: of the video and of its sound."""
    found = placeholder_runs(np.array(ids[start:]), family).media()
    spans = [
        ModalitySpan(start + a, start + b, kind, index, chunk=k)
        for (kind, runs), index in zip(found, indices, strict=True)
        for k, (a, b) in enumerate(runs)
    ]
    return sorted(spans, key=lambda span: span.start)
