"""Columns of prime-rl's nodes and training samples: lists of kept ids, references, arrays, pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.adapters.episodes import fields_of
from mmpack.errors import ArgumentError
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged

REFERENCE = "reference"  # name of the teacher that scored the sampled ids


def at_sampled(values: Any, mask: np.ndarray, name: str, where: str) -> np.ndarray | None:
    """Values of sampled ids at their places [R], 0 elsewhere."""
    if values is None:
        return None
    if len(values) != mask.sum():
        raise ArgumentError(
            f"{where}: {name} has {len(values)} values for {mask.sum()} sampled tokens. Fix: pass it whole"
        )
    out = np.zeros(len(mask), np.float32)
    out[mask] = values
    return out


def kept_lists(
    holder: dict[str, Any], mask: np.ndarray, where: str, start: int = 0
) -> Ragged | None:
    """A list per token from `start` on. Counts are of the sampled tokens (a node), or of all (a sample)."""
    given = holder.get("sampling_mask", holder.get("kept_tokens"))
    if given is None:
        return None
    parts = fields_of(given, f"{where}.sampling_mask")
    ids, counts = (array_of(parts[name], np.int32) for name in ("ids", "counts"))
    if any(a.ndim != 1 or (a.size and a.dtype.kind not in "iu") for a in (ids, counts)):
        raise ArgumentError(
            f"{where}: sampling_mask has ids {ids.dtype} {list(ids.shape)} and counts {counts.dtype} "
            f"{list(counts.shape)}, expected whole numbers [n]. Fix: pass it whole"
        )
    counts = counts.astype(np.int64)
    if len(counts) == mask.sum() and len(counts) != len(mask):
        spread = np.zeros(len(mask), np.int64)
        spread[mask] = counts
        counts = spread
    if len(counts) != len(mask) or counts.sum() != len(ids) or counts[~mask].any():
        raise ArgumentError(
            f"{where}: sampling_mask has {len(counts)} counts of {len(ids)} ids for {mask.sum()} sampled tokens. "
            "Fix: pass it whole"
        )
    if not counts[mask].all():
        at = int(np.flatnonzero(mask & (counts == 0))[0])
        raise ArgumentError(
            f"{where}: sampling_mask keeps no id at token {at}. Fix: set it to None: without lists for all tokens, "
            "logprobs can't be renormalised over them"
        )
    lists = np.split(ids, np.cumsum(counts)[:-1])
    return Ragged.of(lists[start:])


def reference_of(values: Any, ids: Sequence[int], mask: np.ndarray, where: str) -> Any:
    """A teacher that scored only what was sampled: one id per list."""
    if values is None:
        return None
    spread = at_sampled(values, mask, "reference logprobs", where)
    assert spread is not None
    lists = [[t] if m else [] for t, m in zip(ids, mask, strict=True)]
    scores = [[v] if m else [] for v, m in zip(spread.tolist(), mask, strict=True)]
    return {REFERENCE: Ragged.of(lists, scores)}


def array_of(given: Any, dtype: Any = None) -> np.ndarray:
    """An array of an array, of bytes, or of an object with dtype, shape and data."""
    if isinstance(given, bytes):
        return np.frombuffer(given, dtype).copy()
    if hasattr(given, "__array__") or isinstance(given, list | tuple):
        return np.asarray(given)
    parts = fields_of(given, "to_trajectories: an encoded array")
    kind = np.dtype(parts.get("dtype") or dtype or np.uint8)
    return np.frombuffer(parts["data"], kind).reshape(parts["shape"]).copy()


def processed_media(arrays: Mapping[str, Any], processor: Processor, where: str) -> list[Any]:
    """Media of pixels as the renderer's processor made them."""
    from mmpack.adapters.processed_media import media_of_inputs

    found = media_of_inputs(arrays, processor.family, where)
    if found["video"]:
        raise ArgumentError(
            f"{where} has videos as pixels, which can't be read here. Fix: pass media={{url: video}}"
        )
    return list(found["image"])
