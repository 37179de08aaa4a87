"""Runs of tokens [L]: of placeholders (`starts`, `stops` [O] and their modality), and of True in a mask. Half-open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.families import Family, get_family


@dataclass(frozen=True)
class Runs:
    """O runs of placeholders, in order."""

    starts: np.ndarray  # int64 [O]
    stops: np.ndarray  # int64 [O]
    is_video: np.ndarray  # bool [O]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, stop) of each run."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    @property
    def modalities(self) -> list[str]:
        """`image` or `video`, of each run."""
        return ["video" if video else "image" for video in self.is_video.tolist()]

    def of(self, modality: str) -> Runs:
        """The runs of one modality."""
        mine = self.is_video if modality == "video" else ~self.is_video
        return Runs(self.starts[mine], self.stops[mine], self.is_video[mine])


def placeholder_runs(input_ids: Sequence[int] | np.ndarray, family: str | Family) -> Runs:
    """Maximal runs of one placeholder id in `input_ids` int [L], in order.

    Where images and videos have one id, a run is a video's if more videos began before it than ended (`video_bounds`).

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
    kind = (ids == family.image_token_id).astype(np.int8)
    if family.video_bounds is not None:
        begins, ends = (np.cumsum(ids == i) for i in family.video_bounds)
        kind[(kind == 1) & (begins > ends)] = 2
    elif family.video_token_id is not None:
        kind += 2 * (ids == family.video_token_id).astype(np.int8)
    edges = np.flatnonzero(np.diff(kind, prepend=0, append=0))
    starts, stops = edges[:-1], edges[1:]
    keep = kind[starts] > 0
    starts, stops = starts[keep], stops[keep]
    return Runs(starts, stops, kind[starts] == 2)


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
