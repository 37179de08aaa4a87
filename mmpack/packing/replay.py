"""What the engine did, on a batch's own axes: kept ids and teachers by loss token [N], routes by row [T].

A pack has such a column for all of its samples or for none: of a part of them, it would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmpack.ops.logprobs.support import ScoredSupport, Support
from mmpack.schema.ragged import Ragged
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample


class Alike:
    """Whether samples of one pack have the same to be replayed as those before."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}

    def problems(self, sample: Sample) -> list[Problem]:
        """What differs from the samples that `add` was given (MM408)."""
        out = []
        for name, own in _kinds(sample).items():
            first = self.first.get(name, own)
            if own != first:
                message = f"has {_said(name, own)}, but the samples before it {_said(name, first)}"
                out.append(Problem("MM408", sample.sample_id, name, message))
        return out

    def add(self, sample: Sample) -> None:
        self.first = _kinds(sample) | self.first


def _kinds(sample: Sample) -> dict[str, Any]:
    """What all samples must have alike in each column; without a loss token there is nothing to keep."""
    routes = sample.routed_experts
    out: dict[str, Any] = {"routed_experts": None if routes is None else routes.shape[1:]}
    if sample.num_loss_tokens:
        out["kept_ids"] = None if sample.kept_ids is None else ()
    return out


def _said(name: str, kind: Any) -> str:
    if kind is None:
        return "none"
    return f"{kind[1]} experts in each of {kind[0]} layers" if kind else "some"


def replay_fields(samples: Sequence[Sample]) -> dict[str, Any]:
    """`kept_ids` and `teachers` of a batch. A sample without a teacher that others have has empty lists of it."""
    scored = [s for s in samples if s.num_loss_tokens]
    kept = [s.kept_ids for s in scored if s.kept_ids is not None]
    names = dict.fromkeys(name for s in scored for name in s.teachers or {})
    teachers: dict[str, ScoredSupport] = {}
    for name in names:
        lists = [
            (s.teachers or {}).get(name, Ragged.empty(s.num_loss_tokens, scored=True))
            for s in scored
        ]
        joined = Ragged.cat(lists)
        assert joined.logprobs is not None
        scores = torch.from_numpy(joined.logprobs.copy())
        teachers[name] = ScoredSupport(*_tensors(joined), scores)
    return {
        "kept_ids": Support(*_tensors(Ragged.cat(kept))) if kept else None,
        "teachers": teachers,
    }


def _tensors(lists: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(lists.offsets.copy()), torch.from_numpy(lists.ids.astype(np.int64))


def routes_in_rows(
    samples: Sequence[Sample], rows: Sequence[np.ndarray], size: int
) -> torch.Tensor | None:
    """[size, layers, k]: the routes of each row, 0 at the padding; uint8, or int32 where they are uint16.

    `rows`: of each sample's tokens. Rows are shared only by tokens whose routes agree (see layout/forest.py).
    """
    first = samples[0].routed_experts
    if first is None:
        return None
    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    wide = any(own.dtype != np.uint8 for own in routes)  # torch has few operators for uint16
    out = np.zeros((size, *first.shape[1:]), np.int32 if wide else np.uint8)
    for own, where in zip(routes, rows, strict=True):
        out[where] = own
    return torch.from_numpy(out)
