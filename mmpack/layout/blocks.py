"""Two-way blocks: runs of adjacent placeholders that see each other, in families whose attention has such (Gemma).

A block may hold several media, where nothing stands between them. Token indices, half-open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.families import Family
from mmpack.schema.sample import Sample


def two_way_blocks(sample: Sample, family: Family) -> np.ndarray:
    """int64 [n, 2]: start and stop of each block, rising; none for a family without `two_way`.

    Frames of a video with text between them are blocks of their own.
    """
    seeing = () if family.two_way is None else family.two_way.media
    blocks: list[list[int]] = []
    for span in sample.modality_spans:
        if span.modality not in seeing or span.start == span.stop:
            continue
        if blocks and blocks[-1][1] == span.start:
            blocks[-1][1] = span.stop
        else:
            blocks.append([span.start, span.stop])
    return np.asarray(blocks, dtype=np.int64).reshape(-1, 2)


def visible_from(
    samples: Sequence[Sample], rows: Sequence[np.ndarray], size: int, family: Family
) -> np.ndarray:
    """int32 [size]: the first row that sees each row; the row itself, or its block's first one.

    `rows`: of each sample's tokens [L], int64; those of a block are adjacent.
    """
    first = np.arange(size, dtype=np.int32)
    for sample, where in zip(samples, rows, strict=True):
        for start, stop in two_way_blocks(sample, family):
            first[where[start] : where[stop - 1] + 1] = where[start]
    return first
