"""Which calls of the towers encode which media. Ranks whose towers are sharded make equally many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmpack.families import Family
from mmpack.schema.media import Medium


class Call(NamedTuple):
    """Media (numbers) that go through a tower together."""

    modality: str  # whose call of the model it is; images and videos in one are "image"
    media: list[int]
    runs: int = (
        1  # of the tower: of videos whose frames it averages, one per length of their pieces
    )


class Counts(NamedTuple):
    """How often the towers run: that of pictures and videos, and that of audio."""

    vision: int = 0
    audio: int = 0


NONE = Counts()


def calls_of(family: Family, media: Sequence[Medium], max_patches: int | None = None) -> list[Call]:
    """The calls for `media`, those of the vision tower first; each within `max_patches`, or one larger medium."""
    groups: list[tuple[str, list[int]]] = []
    if _together(family):
        groups.append(("image", [i for i, m in enumerate(media) if m.modality != "audio"]))
    else:
        for modality in family.placeholder_ids:
            if modality != "audio":
                own = [i for i, m in enumerate(media) if m.modality == modality]
                groups.append((modality, own))
    groups += [("audio", own) for own in _alike(family, media)]
    counts = [m.num_patches for m in media]
    return [
        Call(modality, chunk, _runs(family, modality, [media[i] for i in chunk]))
        for modality, own in groups
        for chunk in _chunks(own, counts, max_patches)
    ]


def counts_of(calls: Iterable[Call]) -> Counts:
    """How often each tower runs in `calls`."""
    vision = audio = 0
    for call in calls:
        if call.modality == "audio":
            audio += call.runs
        else:
            vision += call.runs
    return Counts(vision, audio)


def most_of(counts: Iterable[Counts]) -> Counts:
    """The largest number of each tower."""
    both = list(counts)
    return Counts(*(max((c[k] for c in both), default=0) for k in range(2)))


def pooled_pieces(grid: tuple[int, int, int], family: Family) -> list[tuple[int, int, int]]:
    """The grid of a video as grids of at most `pooled_frames` frames."""
    t, h, w = grid
    return [(min(family.pooled_frames, t - at), h, w) for at in range(0, t, family.pooled_frames)]


def _together(family: Family) -> bool:
    """Whether the tower reads images and videos alike, by grids (t, h, w), so that one call does."""
    return family.pixel_layout == "patches" and family.pooled_frames == 1


def _runs(family: Family, modality: str, media: Sequence[Medium]) -> int:
    if modality != "video" or family.pooled_frames == 1:
        return 1
    return len({t for m in media for t, _, _ in pooled_pieces(m.grid_thw, family)})


def _alike(family: Family, media: Sequence[Medium]) -> list[list[int]]:
    """Numbers of the audio, in groups that the tower may read in one call."""
    mine = [i for i, m in enumerate(media) if m.modality == "audio"]
    if family.audio is None or not family.audio.padding_shows:
        return [mine]
    groups: dict[int, list[int]] = {}  # by the length that each is padded to
    for i in mine:
        groups.setdefault(min(media[i].grid_thw[0], family.audio.chunk_frames), []).append(i)
    return list(groups.values())


def _chunks(media: list[int], counts: list[int], most: int | None) -> list[list[int]]:
    """Media one after the other, in chunks of at most `most` patches."""
    out: list[list[int]] = []
    held = 0
    for i in media:
        if not out or (most is not None and held + counts[i] > most):
            out.append([])
            held = 0
        out[-1].append(i)
        held += counts[i]
    return out
