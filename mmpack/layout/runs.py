"""Runs of tokens [L]: of placeholders (`starts`, `stops` [O] and their modality), and of True in a mask. Half-open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.families import Family, get_family
from mmpack.schema.spans import MODALITIES


@dataclass(frozen=True)
class Runs:
    """O runs of placeholders, in order."""

    starts: np.ndarray  # int64 [O]
    stops: np.ndarray  # int64 [O]
    kinds: np.ndarray  # int8 [O], index into MODALITIES

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, stop) of each run."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    @property
    def is_video(self) -> np.ndarray:
        """bool [O]."""
        return self.kinds == MODALITIES.index("video")

    @property
    def modalities(self) -> list[str]:
        """`image`, `video` or `audio`, of each run."""
        return [MODALITIES[kind] for kind in self.kinds.tolist()]

    def of(self, modality: str) -> Runs:
        """The runs of one modality."""
        mine = self.kinds == MODALITIES.index(modality)
        return Runs(self.starts[mine], self.stops[mine], self.kinds[mine])

    def media(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Modality and runs of each medium that has no text within, in order of first appearance.

        A video's and an audio's runs that touch are a video with its sound, which has placeholders among its own.
        """
        out: list[tuple[str, list[tuple[int, int]]]] = []
        touching: dict[str, list[tuple[int, int]]] = {}
        end = -1
        for modality, (start, stop) in zip(self.modalities, self.bounds, strict=True):
            if start != end:
                touching = {}
            pieces = touching.get(modality)
            if pieces is None or modality == "image" or "image" in touching:
                pieces = touching[modality] = []
                out.append((modality, pieces))
            pieces.append((start, stop))
            end = stop
        return out


def placeholder_runs(
    input_ids: Sequence[int] | np.ndarray, family: str | Family, offsets: np.ndarray | None = None
) -> Runs:
    """Maximal runs of one placeholder id in `input_ids` int [L], in order.

    Where images and videos have one id, a run is a video's if more videos began before it than ended (`video_bounds`).
    `offsets`: int64 [B+1], of B samples one after the other, of which each has runs of its own.

    Raises: LayoutError (MM006) for an unknown family.

    Example:
        >>> from mmpack.layout.runs import placeholder_runs
        >>> image, video = 151655, 151656
        >>> runs = placeholder_runs([7, image, image, 8, video], "qwen2_vl")
        >>> runs.bounds, runs.modalities
        ([(1, 3), (4, 5)], ['image', 'video'])
    """
    family = get_family(family)
    ids = np.asarray(input_ids)
    kind = np.zeros(len(ids) + 2, dtype=np.int8)  # 0 at both ends
    inner = kind[1:-1]
    for modality, token in family.placeholder_ids.items():
        if modality != "video" or family.video_bounds is None:
            found = ids == token
            if found.any():
                inner[found] = 1 + MODALITIES.index(modality)
    if family.video_bounds is not None:
        begin, end = family.video_bounds
        open_videos = np.cumsum((ids == begin).astype(np.int64) - (ids == end))
        if offsets is not None:
            before = np.append(0, open_videos)[offsets[:-1]]
            open_videos -= np.repeat(before, np.diff(offsets))
        inner[(inner == 1) & (open_videos > 0)] = 2
    changes = kind[1:] != kind[:-1]
    if offsets is not None:
        changes[offsets] = True
    edges = changes.nonzero()[0]
    starts, stops = edges[:-1], edges[1:]
    kinds = inner[starts] - 1
    keep = (kinds >= 0).nonzero()[0]
    return Runs(starts[keep], stops[keep], kinds[keep])


def true_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of each maximal run of True in `mask` bool [L], in order.

    Example:
        >>> import numpy as np
        >>> from mmpack.layout.runs import true_runs
        >>> true_runs(np.array([True, False, True, True]))
        [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
