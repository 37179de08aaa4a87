"""`pack`: samples to one row of T tokens without padding between them; shared prefixes once if asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mmpack.errors import SchemaError
from mmpack.families import Family
from mmpack.layout.batch_positions import batch_positions
from mmpack.layout.blocks import visible_from
from mmpack.layout.forest import Forest, build_forest
from mmpack.layout.lines import count_on
from mmpack.layout.occurrences import occurrences
from mmpack.ops.attention import plan_attention
from mmpack.packing.batch import PackedBatch, refuse_no_accelerator
from mmpack.packing.columns import Column, token_columns_of
from mmpack.packing.media import vision_rows
from mmpack.packing.prepare import common_fields, counted, prepare, row_multiple
from mmpack.packing.replay import routes_in_rows
from mmpack.packing.segments import segments_of
from mmpack.packing.tensors import to_int32
from mmpack.planning.cost import CostModel, family_cost, sharing_of
from mmpack.planning.counts import counts_of_forest
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan


def pack(
    samples: Sequence[Sample],
    media: Mapping[str, Any] | None = None,
    share_prefix: bool | str = False,
    pad_to_multiple_of: int | None = None,
    loss_columns: Mapping[str, Column] | None = None,
    token_columns: Mapping[str, Column] | None = None,
    on_invalid: str = "raise",
    pin_memory: bool = False,
    cost: CostModel | None = None,
) -> PackedBatch:
    """Pack `samples` of one family into one row. A sample may occur twice (frameworks fill ranks so).

    Args:
        media: cache key -> pixels [t·h·w, patch_dim], for media that hold none themselves.
        share_prefix: lay rows out once whose ids, positions, media and routes agree, at any depth; "auto": if that
            takes less time by `cost`, for these samples as a whole.
        pad_to_multiple_of: add rows that see and are seen by nothing until T is a multiple.
        loss_columns, token_columns: name -> one array per sample, or one array of all: one value per loss token ([N]),
            or per token ([sum of L, …]; shared rows must agree bit for bit).
        on_invalid: `raise`, or `drop` what breaks a rule and list it in `.dropped`.
        cost: of the model, as `plan` takes it; else that of a model as large as Qwen2.5-VL-7B.
        pin_memory: make the batch in page-locked memory; pixels are copied once, where `.pin_memory()` copies again.

    Returns: PackedBatch on the CPU. Raises: SchemaError with all broken rules; ArgumentError; BackendError as
    `PackedBatch.pin_memory`.

    Example:
        >>> import mmpack as mp
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> text["loss_spans"] = [{"start": 2, "stop": 3, "kind": "response"}]
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"sample_id": f"q/{k}", "input_ids": [5, 6, 7 + k]})
        ...     for k in range(2)
        ... ]
        >>> mp.pack(samples).input_ids.tolist()
        [5, 6, 7, 5, 6, 8]
        >>> batch = mp.pack(samples, share_prefix=True)
        >>> batch.input_ids.tolist(), batch.loss_rows.tolist(), batch.loss_targets.tolist()
        ([5, 6, 7, 8], [1, 1], [7, 8])
    """
    multiple = row_multiple(pad_to_multiple_of, "pack")
    if pin_memory:
        refuse_no_accelerator()
    given = prepare(samples, loss_columns, token_columns, "pack", on_invalid)
    samples, family = given.samples, given.family
    sharing = sharing_of(share_prefix, family, "pack")
    if sharing and family.sharing != "tree":
        message = f"is {family.name}, whose rows can't be shared"
        raise SchemaError([Problem("MM401", samples[0].sample_id, "family", message)], "pack")
    ids = np.concatenate([s.input_ids for s in samples])
    starts = np.cumsum([0, *map(len, samples)])
    # rows of a pack that shares none; of another one they are taken from there
    height = family.position_rows if family.position_rows > 1 else 0
    position_ids = np.empty((1 + height, len(ids) + -len(ids) % multiple), dtype=np.int64)
    out = position_ids[1:, : len(ids)] if height else None
    positions = batch_positions(samples, family, ids, out)
    forest = build_forest(samples, bool(sharing), np.split(positions, starts[1:-1], axis=1))
    if sharing == "auto":
        plain = build_forest(samples, share=False)
        cost = cost or family_cost(family)
        both = [counts_of_forest(made, cost.spans) for made in (plain, forest)]
        forest = forest if cost.sharing_pays(*both) else plain
    rows = [forest.rows(b) for b in range(len(samples))]
    runs = _runs(samples, rows)
    padding = -forest.num_tokens % multiple
    common = common_fields(
        given, rows, [(run.sample, run.media_index) for run in runs], media, pin_memory
    )
    in_rows = _row_fields(
        samples, family, ids, positions, starts, forest, rows, padding, position_ids
    )
    batch = PackedBatch(
        **common,
        **in_rows,
        **_segment_fields(forest, padding),
        segment_plan=segments_of(
            family,
            forest.segment_offsets,
            forest.segment_parent,
            np.arange(forest.num_tokens + padding) >= forest.num_tokens,
            in_rows["attention_plan"],
        ),
        **_media_fields(given.samples, family, runs, in_rows["input_ids"], common),
        loss_spans=[_spans_in_rows(s, r) for s, r in zip(samples, rows, strict=True)],
        token_columns={
            name: torch.cat([x, x.new_zeros((padding, *x.shape[1:]))])
            for name, x in token_columns_of(samples, given.token_columns, forest, "pack").items()
        },
        routed_experts=routes_in_rows(given.samples, rows, forest.num_tokens + padding),
        num_tokens=forest.num_tokens,
    )
    batch.stats = counted(batch, tokens=forest.num_tokens, padded=forest.num_tokens + padding)
    batch.stats |= {
        "segments": len(forest.segment_parent),
        "patches": sum(m.num_patches for m in batch.media),
    }
    return batch.pin_memory() if pin_memory else batch


class _Run(NamedTuple):
    """Rows [start, stop) of one occurrence of a medium, and a sample that has it."""

    start: int
    stop: int
    sample: int
    media_index: int


def _runs(samples: Sequence[Sample], rows: list[np.ndarray]) -> list[_Run]:
    """The occurrences of media in row order, shared ones once."""
    out: dict[int, _Run] = {}
    for b, sample in enumerate(samples):
        for start, stop, m in occurrences(sample):
            first = int(rows[b][start])
            out.setdefault(first, _Run(first, int(rows[b][stop - 1]) + 1, b, m))
    return [out[first] for first in sorted(out)]


def _row_fields(
    samples: Sequence[Sample],
    family: Family,
    ids: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    forest: Forest,
    rows: list[np.ndarray],
    padding: int,
    position_ids: np.ndarray,
) -> dict[str, Any]:
    """ids, positions and the attention rule of every row.

    Args: `ids` [L], `positions` [rows, L]: of all tokens, samples [B] from `starts` on; each segment is read from a
    sample that has it. `position_ids`: the rows', which hold `positions` already, if every token has a row of its own.
    """
    total = forest.num_tokens
    lengths = np.diff(forest.segment_offsets)
    first = starts[forest.segment_sample] + forest.segment_depth
    cuts = _ranges(first, first + lengths)
    in_place = cuts == [(0, len(ids))]
    if in_place and not padding:
        input_ids = ids
    else:
        input_ids = np.empty(total + padding, dtype=np.int64)
        input_ids[total:] = family.pad_token_id
        np.concatenate([ids[a:b] for a, b in cuts], out=input_ids[:total])
    if not in_place:
        position_ids = np.empty((len(position_ids), total + padding), dtype=np.int64)
        if len(position_ids) > 1:
            parts = [positions[:, a:b] for a, b in cuts]
            np.concatenate(parts, axis=1, out=position_ids[1:, :total])
    position_ids[:, total:] = 0
    _write_places(position_ids[0, :total], forest)
    seen = np.empty(total + padding, dtype=np.int32)
    seen[:total] = forest.visible_until()
    seen[total:] = np.arange(total + 1, total + padding + 1)
    two_way = None
    if family.two_way is not None:
        two_way = visible_from(samples, rows, total + padding, family)
    padded = np.zeros(total + padding, dtype=bool)
    padded[total:] = True
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "visible_until": torch.from_numpy(seen),
        "visible_from": None if two_way is None else torch.from_numpy(two_way),
        "attention_plan": plan_attention(seen, padded, two_way),
    }


def _write_places(places: np.ndarray, forest: Forest) -> None:
    """Write each row's place in its sequence, which rises by one from its segment's depth."""
    lengths = np.diff(forest.segment_offsets)
    held = lengths.nonzero()[0]
    places[:] = 1
    depths = forest.segment_depth[held]
    count_on(places, forest.segment_offsets[held], depths, lengths[held] - 1)


def _ranges(starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int]]:
    """Ranges in their order, those that touch as one."""
    new = np.append(True, starts[1:] != stops[:-1])[: len(starts)]
    ends = np.append(new[1:], True)[: len(stops)]
    return list(zip(starts[new].tolist(), stops[ends].tolist(), strict=True))


def _segment_fields(forest: Forest, padding: int) -> dict[str, Any]:
    """The forest; cu_seqlens and max_seqlen where no row belongs to two samples."""
    out: dict[str, Any] = {
        "segment_offsets": to_int32(forest.segment_offsets),
        "segment_parent": to_int32(forest.segment_parent),
        "sample_segment": to_int32(forest.sample_segment),
        "cu_seqlens": None,
        "max_seqlen": None,
    }
    if not forest.shared:
        ends = forest.segment_offsets
        if padding:
            ends = np.append(ends, forest.num_tokens + padding)
        out |= {"cu_seqlens": to_int32(ends), "max_seqlen": int(np.diff(ends).max())}
    return out


def _media_fields(
    samples: Sequence[Sample],
    family: Family,
    runs: list[_Run],
    input_ids: torch.Tensor,
    common: dict[str, Any],
) -> dict[str, Any]:
    """Where media lie in rows: spans, and the embedding of each row."""
    order = common["media_order"]
    offsets = common["vision_token_offsets"].numpy()
    return {
        "modality_spans": [
            ModalitySpan(
                run.start, run.stop, samples[run.sample].media[run.media_index].modality, at
            )
            for run, at in zip(runs, order, strict=True)
        ],
        "vision_rows": vision_rows(input_ids.numpy(), family, common["media"], order, offsets),
    }


def _spans_in_rows(sample: Sample, rows: np.ndarray) -> list[LossSpan]:
    """The sample's loss spans in rows: cut where its path jumps from one segment to the next."""
    out = []
    for s in sample.loss_spans:
        where = rows[s.start : s.stop]
        cuts = np.flatnonzero(np.diff(where) != 1) + 1
        for piece in np.split(where, cuts) if len(where) else []:
            out.append(LossSpan(int(piece[0]), int(piece[-1]) + 1, s.kind, s.turn))
    return out
