"""The budgets of a micro-batch, and what samples take of each: packed rows, patches, samples, loss tokens, media bytes.

A medium counts once per micro-batch, by cache key; so does a row that samples share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmpack.errors import check_number
from mmpack.families import FAMILIES
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample
from mmpack.schema.specs import INT_MAX


class OfMedium(NamedTuple):
    """What a medium takes: patches before merging, and bytes of its pixels; and what it is."""

    patches: int
    bytes: int
    modality: str = "image"
    grid: tuple[int, int, int] = (0, 0, 0)


# name: the field of a sample that a finding points at, and what is counted there
COUNTED = {
    "max_tokens": ("input_ids", "tokens"),
    "max_patches": ("media", "patches"),
    "max_loss_tokens": ("loss_spans", "loss tokens"),
    "max_media_bytes": ("media", "bytes of pixels"),
}


@dataclass(frozen=True)
class Budgets:
    """What one micro-batch may hold; None: as much as there is."""

    max_tokens: int
    max_patches: int | None = None
    max_samples: int | None = None
    max_loss_tokens: int | None = None
    max_media_bytes: int | None = None

    def check(self) -> None:
        """Raise ArgumentError for a budget that is no whole number, or too small for anything."""
        for name, value in vars(self).items():
            least = 0 if name in ("max_patches", "max_loss_tokens", "max_media_bytes") else 1
            if value is not None or name == "max_tokens":
                check_number("plan", name, value, least=least, most=INT_MAX)

    def excess(self, sample: Sample) -> list[Problem]:
        """The budgets that a sample exceeds by itself (MM405)."""
        out = []
        for name, taken in _taken(sample).items():
            most = getattr(self, name)
            if most is not None and taken > most:
                field, counted = COUNTED[name]
                message = f"has {taken} {counted}, {name} is {most}"
                out.append(Problem("MM405", sample.sample_id, field, message))
        return out

    def enough_for(self, samples: Sequence[Sample]) -> str:
        """The budgets that would take each of `samples`, as arguments: only those that are too small."""
        most = {name: max(_taken(s)[name] for s in samples) for name in COUNTED}
        given = {name: getattr(self, name) for name in COUNTED}
        return ", ".join(
            f"{name}={needed}"
            for name, needed in most.items()
            if given[name] is not None and needed > given[name]
        )


def media_of(sample: Sample) -> dict[str, OfMedium]:
    """What each distinct medium takes, by cache key."""
    return {
        m.cache_key: OfMedium(m.num_patches, _bytes(m, sample), m.modality, m.grid_thw)
        for m in sample.media
    }


def _taken(sample: Sample) -> dict[str, int]:
    media = media_of(sample).values()
    return {
        "max_tokens": len(sample),
        "max_patches": sample.num_patches,
        "max_loss_tokens": sample.num_loss_tokens,
        "max_media_bytes": sum(m.bytes for m in media),
    }


def _bytes(medium: Medium, sample: Sample) -> int:
    """Bytes of the pixels (an audio's features) that it holds; else of as many in float32."""
    pixels: Any = medium.pixel_values
    if hasattr(pixels, "nbytes"):
        return int(pixels.nbytes)
    return 4 * math.prod(FAMILIES[sample.family].pixel_shape(medium.grid_thw, medium.modality))
