"""Ids of a discrete audio codec, as the encoder gave them: [levels, frames], carried for parity and never packed.

Level 0 is the coarsest; each further level codes what the ones before left over (residual quantization).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.schema.fields import Record, column
from mmpack.schema.specs import COUNT_MAX, Array, Float, Ints, Json, Str


@dataclass(eq=False)
class CodecIds(Record):
    """One piece of audio as its codec's ids."""

    codec: str = column(Str(), "name and revision of the codec")
    codes: np.ndarray = column(Array("int32", rows=0, high=COUNT_MAX), "ids, levels by frames")
    codebook_sizes: tuple[int, ...] = column(Ints(), "ids of each level's codebook")
    frame_rate: float = column(Float(), "frames per second")
    content_hash: str | None = column(
        Str(), "sha256 of the samples that the encoder was handed", None
    )
    metadata: dict[str, Any] = column(
        Json(),
        "unknown fields, carried through; `batch_shape`: of the encoder's call",
        factory=dict,
    )
