"""Samples out of parts, as a kit writes its family's media; pixels are noise that follows from the medium's key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.kits import get_kit
from support.kits.base import Kit

from mmpack.demo.probe_samples import draw_pixels, medium_of, placeholder_spans
from mmpack.families import Family, get_family
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.tmrope import interleaved
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan


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


def probe_samples(family: str) -> list[Sample]:
    """Four samples of a family, whose media hold drawn pixels.

    Raises: LayoutError (MM006) for an unknown family; ArgumentError for one without a kit.
    """
    kit = get_kit(get_family(family).name, "probe_samples")
    random = np.random.default_rng(0)

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
