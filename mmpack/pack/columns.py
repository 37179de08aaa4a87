"""Columns that the caller hands in: one value a loss token ([N]), or one a token ([T, …])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.errors import SchemaError
from mmpack.plan.forest import Forest
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample

Column = Sequence[Any] | np.ndarray | torch.Tensor


def loss_columns(
    samples: Sequence[Sample], given: Mapping[str, Column] | None, what: str
) -> dict[str, torch.Tensor]:
    """[N] tensors: `given` per sample or already concatenated; `rollout_logprobs` comes from the samples."""
    out: dict[str, torch.Tensor] = {}
    counts = [s.num_loss_tokens for s in samples]
    columns: dict[str, Column] = dict(given or {})
    if "rollout_logprobs" not in columns and all(s.rollout_logprobs is not None for s in samples):
        columns["rollout_logprobs"] = [s.rollout_logprobs for s in samples]
    for name, column in columns.items():
        pieces = _per_sample(samples, name, column, counts, what)
        out[name] = torch.cat(pieces) if pieces else torch.zeros(0)
    return out


def token_columns(
    samples: Sequence[Sample], given: Mapping[str, Column] | None, forest: Forest, what: str
) -> dict[str, torch.Tensor]:
    """[T, …] tensors; the rows that samples share must agree bit for bit."""
    out: dict[str, torch.Tensor] = {}
    for name, column in (given or {}).items():
        pieces = _per_sample(samples, name, column, [len(s) for s in samples], what)
        first = pieces[0] if pieces else torch.zeros(0)
        packed = first.new_zeros((forest.num_tokens, *first.shape[1:]))
        written = torch.zeros(forest.num_tokens, dtype=torch.bool)
        for b, piece in enumerate(pieces):
            rows = torch.from_numpy(forest.rows(b))
            old = written[rows]
            unlike = old & ~_same_bits(packed[rows], piece)
            if unlike.any():
                at = int(unlike.int().argmax())
                message = f"differs at token {at} from the sample that shares the row"
                problem = Problem(
                    "MM402", samples[b].sample_id, f"token_columns[{name!r}]", message
                )
                raise SchemaError([problem], what)
            packed[rows] = piece
            written[rows] = True
        out[name] = packed
    return out


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [n]: rows with the same bytes (so NaN equals NaN, and -0.0 differs from 0.0)."""
    if len(a) == 0 or a[0].numel() == 0:
        return torch.ones(len(a), dtype=torch.bool)
    as_bytes = [x.contiguous().reshape(len(x), -1).view(torch.uint8) for x in (a, b)]
    return (as_bytes[0] == as_bytes[1]).all(dim=1)


def _per_sample(
    samples: Sequence[Sample], name: str, column: Column, counts: list[int], what: str
) -> list[torch.Tensor]:
    total = sum(counts)
    flat = isinstance(column, (np.ndarray, torch.Tensor)) and column.ndim >= 1
    if flat and column.dtype != np.dtype(object) and len(column) == total:
        return list(torch.as_tensor(column).split(counts)) if counts else []
    if len(column) != len(samples):
        message = f"has {len(column)} entries for {len(samples)} samples and {total} tokens"
        raise SchemaError([Problem("MM403", "batch", name, message)], what)
    pieces = [torch.as_tensor(c) for c in column]
    for sample, piece, count in zip(samples, pieces, counts, strict=True):
        if piece.ndim == 0 or len(piece) != count:
            message = f"has shape {list(piece.shape)}, the sample has {count}"
            raise SchemaError([Problem("MM403", sample.sample_id, name, message)], what)
    return pieces
