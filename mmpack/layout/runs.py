"""Runs of placeholders in token ids: `starts`, `stops` [O] and which modality each run is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.families import Family, get_family


@dataclass(frozen=True)
class Runs:
    starts: np.ndarray  # int64 [O]
    stops: np.ndarray  # int64 [O]
    is_video: np.ndarray  # bool [O]

    def __len__(self) -> int:
        return len(self.starts)


def placeholder_runs(input_ids: np.ndarray, family: str | Family) -> Runs:
    """Maximal runs of one placeholder id in `input_ids` [L], in order."""
    family = get_family(family)
    ids = np.asarray(input_ids)
    kind = (ids == family.image_token_id).astype(np.int8)
    if family.video_token_id is not None:
        kind += 2 * (ids == family.video_token_id).astype(np.int8)
    edges = np.flatnonzero(np.diff(kind, prepend=0, append=0))
    starts, stops = edges[:-1], edges[1:]
    keep = kind[starts] > 0
    starts, stops = starts[keep], stops[keep]
    return Runs(starts, stops, kind[starts] == 2)
