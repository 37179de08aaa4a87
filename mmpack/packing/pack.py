"""`pack`: samples to one row of T tokens without padding, shared prefixes once if asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.errors import SchemaError
from mmpack.families import get_family
from mmpack.layout.forest import Forest, build_forest, positions_of
from mmpack.layout.occurrences import occurrences
from mmpack.ops.attention import plan_attention
from mmpack.packing.batch import PackedBatch
from mmpack.packing.columns import Column
from mmpack.packing.columns import token_columns as pack_token_columns
from mmpack.packing.media import vision_rows
from mmpack.packing.prepare import (
    common_fields,
    keep_valid,
    kept_columns,
    loss_tokens_of,
    row_multiple,
)
from mmpack.packing.tensors import to_int32
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.spans import LossSpan, ModalitySpan


def pack(
    samples: Sequence[Sample],
    media: Mapping[str, Any] | None = None,
    share_prefix: bool = False,
    pad_to_multiple_of: int | None = None,
    loss_columns: Mapping[str, Column] | None = None,
    token_columns: Mapping[str, Column] | None = None,
    on_invalid: str = "raise",
) -> PackedBatch:
    """Pack `samples` of one family into one row. A sample may occur twice (frameworks fill ranks so).

    Args:
        media: cache key -> pixels [t·h·w, patch_dim], for media that hold none themselves.
        share_prefix: lay rows out once whose ids, positions and media agree, at any depth.
        pad_to_multiple_of: add rows that see and are seen by nothing until T is a multiple.
        loss_columns, token_columns: name -> one array a sample, or one array of all: a value a loss token ([N]),
            a value a token ([sum of L, …]; shared rows must agree bit for bit).
        on_invalid: `raise`, or `drop` what breaks a rule and list it in `.dropped`.

    Returns: PackedBatch on the CPU. Raises: SchemaError with all broken rules; ArgumentError.
    """
    multiple = row_multiple(pad_to_multiple_of, "pack")
    samples = as_samples(samples, "pack")
    keep, dropped = keep_valid(samples, "pack", on_invalid)
    if dropped:
        loss_columns = kept_columns(loss_columns, samples, loss_tokens_of, keep, "pack")
        token_columns = kept_columns(token_columns, samples, len, keep, "pack")
        samples = [samples[i] for i in keep]
    if share_prefix and get_family(samples[0].family).sharing != "tree":
        message = f"is {samples[0].family}, whose rows can't be shared"
        raise SchemaError([Problem("MM401", samples[0].sample_id, "family", message)], "pack")
    positions = [positions_of(s) for s in samples]
    forest = build_forest(samples, share_prefix, positions)
    rows = [forest.rows(b) for b in range(len(samples))]
    runs = _runs(samples, forest, rows)
    common = common_fields(
        samples, rows, [(b, m) for _, _, b, m in runs], media, loss_columns, "pack"
    )
    total = forest.num_tokens
    padding = -total % multiple
    laid_out = _rows(samples, positions, forest, padding)
    batch = PackedBatch(
        **common,
        **laid_out,
        attention_plan=plan_attention(
            laid_out["visible_until"].numpy(), np.arange(total + padding) >= total
        ),
        **_sequences(forest, total, padding),
        segment_offsets=to_int32(forest.segment_offsets),
        segment_parent=to_int32(forest.segment_parent),
        sample_segment=to_int32(forest.sample_segment),
        modality_spans=[
            ModalitySpan(start, stop, samples[b].media[m].modality, int(at))
            for (start, stop, b, m), at in zip(runs, common["media_occurrence"], strict=True)
        ],
        vision_rows=vision_rows(
            laid_out["input_ids"].numpy(),
            get_family(samples[0].family),
            common["media_order"],
            common["vision_token_offsets"].numpy(),
        ),
        loss_spans=[_spans_in_rows(s, r) for s, r in zip(samples, rows, strict=True)],
        token_columns={
            name: torch.cat([x, x.new_zeros((padding, *x.shape[1:]))])
            for name, x in pack_token_columns(samples, token_columns, forest, "pack").items()
        },
        num_tokens=total,
        dropped=dropped,
    )
    batch.stats = {
        "tokens": total,
        "tokens_unshared": sum(batch.token_counts),
        "tokens_padded": total + padding,
        "loss_tokens": batch.num_loss_tokens,
        "segments": len(forest.segment_parent),
        "media": len(batch.media),
        "media_occurrences": len(runs),
        "patches": int(batch.patch_offsets[-1]),
    }
    return batch


def _rows(
    samples: list[Sample], positions: list[np.ndarray], forest: Forest, padding: int
) -> dict[str, Any]:
    """ids, positions and the attention rule of every row, each segment from a sample that has it."""
    family = get_family(samples[0].family)
    ids, places, counted = [], [], []
    segments = zip(
        forest.segment_sample, forest.segment_depth, np.diff(forest.segment_offsets), strict=True
    )
    for b, depth, length in segments:
        ids.append(samples[b].input_ids[depth : depth + length])
        places.append(positions[b][:, depth : depth + length])
        counted.append(np.arange(depth, depth + length))
    total = forest.num_tokens
    ids.append(np.full(padding, family.pad_token_id, dtype=np.int64))
    along = np.concatenate([*counted, np.zeros(padding, dtype=np.int64)])[None]
    if family.position_rows > 1:
        places.append(np.zeros((family.position_rows, padding), dtype=np.int64))
        along = np.concatenate([along, np.concatenate(places, axis=1)])
    seen = np.concatenate([forest.visible_until(), np.arange(total + 1, total + padding + 1)])
    return {
        "input_ids": torch.from_numpy(np.concatenate(ids)),
        "position_ids": torch.from_numpy(along),
        "visible_until": to_int32(seen),
    }


def _sequences(forest: Forest, total: int, padding: int) -> dict[str, Any]:
    """cu_seqlens and max_seqlen, where no row belongs to two samples."""
    if forest.shared:
        return {"cu_seqlens": None, "max_seqlen": None}
    ends = forest.segment_offsets
    if padding:
        ends = np.append(ends, total + padding)
    return {"cu_seqlens": to_int32(ends), "max_seqlen": int(np.diff(ends).max())}


def _runs(
    samples: list[Sample], forest: Forest, rows: list[np.ndarray]
) -> list[tuple[int, int, int, int]]:
    """(first row, one past the last, sample, media_index) of each placeholder run, in row order, shared ones once."""
    out: dict[int, tuple[int, int, int, int]] = {}
    for b, sample in enumerate(samples):
        for start, stop, m in occurrences(sample):
            first = int(rows[b][start])
            out.setdefault(first, (first, int(rows[b][stop - 1]) + 1, b, m))
    return [out[first] for first in sorted(out)]


def _spans_in_rows(sample: Sample, rows: np.ndarray) -> list[LossSpan]:
    """The sample's loss spans in rows: cut where its path jumps from one segment to the next."""
    out = []
    for s in sample.loss_spans:
        where = rows[s.start : s.stop]
        cuts = np.flatnonzero(np.diff(where) != 1) + 1
        for piece in np.split(where, cuts) if len(where) else []:
            out.append(LossSpan(int(piece[0]), int(piece[-1]) + 1, s.kind, s.turn))
    return out
