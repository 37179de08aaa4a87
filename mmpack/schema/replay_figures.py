"""A few figures of what a sample holds to be replayed, for `inspect` and the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample


def replay_figures(sample: Sample) -> dict[str, Any]:
    """Return sizes of the sample's `kept_ids`, `teachers` and `routed_experts`, per loss token or token."""
    out: dict[str, Any] = {}
    if sample.kept_ids is not None:
        out["kept_ids"] = _lengths(sample.kept_ids)
    if sample.teachers:
        out["teachers"] = {name: _lengths(lists) for name, lists in sample.teachers.items()}
    routes = sample.routed_experts
    if routes is not None:
        out["routed_experts"] = {
            "layers": routes.shape[1],
            "experts_per_token": routes.shape[2],
            "dtype": routes.dtype.name,
            "bytes_per_token": int(routes[:1].nbytes),
        }
    return out


def _lengths(lists: Ragged) -> dict[str, Any]:
    lengths = lists.lengths if len(lists) else np.zeros(1, np.int64)
    return {
        "lists": len(lists),
        "ids": len(lists.ids),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
        "most": int(lengths.max()),
    }
