"""Columns that the caller hands in: one value per loss token ([N]), or one per token ([T, …])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError, SchemaError
from mmpack.layout.forest import Forest
from mmpack.packing.tensors import as_tensor
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample

Column = Sequence[Any] | np.ndarray | torch.Tensor


def given_columns(given: Mapping[str, Column] | None, what: str) -> Mapping[str, Column]:
    """Columns by name. Raises ArgumentError."""
    if not isinstance(given, Mapping | None):
        raise ArgumentError(
            f"{what}: the columns are {type(given).__name__}, expected a dict of names to values. "
            'Fix: pass {"advantages": values}'
        )
    return given or {}


def loss_columns_of(
    samples: Sequence[Sample], given: Mapping[str, Column] | None, what: str
) -> dict[str, torch.Tensor]:
    """[N] tensors: `given` per sample or already concatenated; `rollout_logprobs` come from the samples.

    They do if every sample with a loss token has some, and the caller gives none.
    """
    counts = [s.num_loss_tokens for s in samples]
    columns: dict[str, Column] = dict(given_columns(given, what))
    if "rollout_logprobs" not in columns:
        scored = [s for s in samples if s.num_loss_tokens]
        recorded = [s.rollout_logprobs for s in scored if s.rollout_logprobs is not None]
        known = any(s.rollout_logprobs is not None for s in samples)
        if known and len(recorded) == len(scored):
            columns["rollout_logprobs"] = np.concatenate([np.zeros(0, np.float32), *recorded])
    return {
        name: torch.cat(_pieces(samples, name, column, counts, what))
        for name, column in columns.items()
    }


def token_columns_of(
    samples: Sequence[Sample], given: Mapping[str, Column] | None, forest: Forest, what: str
) -> dict[str, torch.Tensor]:
    """[T, …] tensors; the rows that samples share must agree bit for bit."""
    out: dict[str, torch.Tensor] = {}
    for name, column in given_columns(given, what).items():
        pieces = _pieces(samples, name, column, [len(s) for s in samples], what)
        packed = pieces[0].new_zeros((forest.num_tokens, *pieces[0].shape[1:]))
        written = torch.zeros(forest.num_tokens, dtype=torch.bool)
        for b, piece in enumerate(pieces):
            rows = torch.from_numpy(forest.rows(b))
            unlike = written[rows] & ~_same_bits(packed[rows], piece)
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


def split_column(name: str, column: Column, counts: list[int], what: str) -> list[Any]:
    """One piece per sample: `column` has one entry each, or is one array of sum(counts) values."""
    total = sum(counts)
    if not hasattr(column, "__len__") or getattr(column, "ndim", 1) == 0:
        raise SchemaError([Problem("MM403", "batch", name, "is a single number")], what)
    flat = isinstance(column, torch.Tensor) or (
        isinstance(column, np.ndarray) and column.dtype != np.dtype(object)
    )
    if flat and len(column) == total:
        return list(as_tensor(column).split(counts))
    if len(column) != len(counts):
        message = f"has {len(column)} entries for {len(counts)} samples and {total} values"
        raise SchemaError([Problem("MM403", "batch", name, message)], what)
    return list(column)


def _pieces(
    samples: Sequence[Sample], name: str, column: Column, counts: list[int], what: str
) -> list[torch.Tensor]:
    """CPU tensors [count, …] of one dtype and one trailing shape. An empty piece takes those of the others."""
    pieces = [
        _numbers(c, name, sample, what)
        for c, sample in zip(split_column(name, column, counts, what), samples, strict=True)
    ]
    full = [p for p, count in zip(pieces, counts, strict=True) if count]
    trailing = full[0].shape[1:] if full else torch.Size()
    for sample, piece, count in zip(samples, pieces, counts, strict=True):
        if piece.ndim == 0 or len(piece) != count or (count and piece.shape[1:] != trailing):
            message = f"has shape {list(piece.shape)}, expected {[count, *trailing]}"
            raise SchemaError([Problem("MM403", sample.sample_id, name, message)], what)
    dtype = full[0].dtype if full else torch.float32
    for piece in full:
        dtype = torch.promote_types(dtype, piece.dtype)
    return [p.to(dtype) if len(p) else torch.zeros(0, *trailing, dtype=dtype) for p in pieces]


def _numbers(values: Any, name: str, sample: Sample, what: str) -> torch.Tensor:
    try:
        return as_tensor(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        problem = Problem("MM403", sample.sample_id, name, f"is not an array of numbers ({error})")
        raise SchemaError([problem], what) from None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [n]: rows with the same bytes (so NaN equals NaN, and -0.0 differs from 0.0)."""
    if a.numel() == 0:
        return torch.ones(len(a), dtype=torch.bool)
    as_bytes = [x.contiguous().reshape(len(x), -1).view(torch.uint8) for x in (a, b)]
    return (as_bytes[0] == as_bytes[1]).all(dim=1)
