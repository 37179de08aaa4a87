"""The media of a batch: each distinct one once, in order of first use; `pixel_values` [patches, patch_dim]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmpack.errors import SchemaError
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample


@dataclass
class MediaTable:
    """Distinct media by cache key; `index` maps a key to its place."""

    media: list[Medium] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)

    def add(self, medium: Medium, store: Mapping[str, Any] | None) -> int:
        at = self.index.setdefault(medium.cache_key, len(self.media))
        if at == len(self.media):
            self.media.append(medium)
        if self.media[at].pixel_values is None:
            pixels = medium.pixel_values
            if pixels is None and store is not None:
                pixels = store.get(medium.cache_key)
            if pixels is not None:
                self.media[at] = with_pixels(medium, pixels)
        return at


def with_pixels(medium: Medium, pixels: Any) -> Medium:
    """`medium` holding `pixels` [t·h·w, patch_dim] as a tensor; the caller's object stays as it was."""
    t, h, w = medium.grid_thw
    tensor = torch.as_tensor(np.asarray(pixels) if not torch.is_tensor(pixels) else pixels)
    if tensor.ndim != 2 or tensor.shape[0] != t * h * w:
        message = f"has pixel_values of shape {list(tensor.shape)}, its grid {[t, h, w]}"
        problem = Problem(
            "MM404", medium.media_id, "pixel_values", f"{message} needs {t * h * w} rows"
        )
        raise SchemaError([problem], "pack")
    out = Medium(**{f.name: getattr(medium, f.name) for f in Medium.columns()})
    out.pixel_values = tensor
    return out


def stack_pixels(media: Sequence[Medium]) -> torch.Tensor | None:
    """All patches, medium after medium; None if a medium has none (or there are no media)."""
    if not media or any(m.pixel_values is None for m in media):
        return None
    return torch.cat([torch.as_tensor(m.pixel_values) for m in media])


def patch_offsets(media: Sequence[Medium]) -> list[int]:
    """[M+1]: patches of medium i are rows [i], [i+1) of the stacked pixels."""
    out = [0]
    for m in media:
        t, h, w = m.grid_thw
        out.append(out[-1] + t * h * w)
    return out


def occurrences(sample: Sample) -> list[tuple[int, int, int]]:
    """(start, stop, media_index) of each run of placeholders: frames of one video are one occurrence."""
    out: list[tuple[int, int, int]] = []
    for s in sample.modality_spans:
        if s.frame and out and out[-1][2] == s.media_index:
            out[-1] = (out[-1][0], s.stop, s.media_index)
        else:
            out.append((s.start, s.stop, s.media_index))
    return out
