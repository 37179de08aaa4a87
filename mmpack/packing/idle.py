"""A batch of nothing: what a rank runs where it has no samples and others have some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from mmpack.errors import ArgumentError, kind_of
from mmpack.families import FAMILIES, get_family
from mmpack.ops.logprobs.support import ScoredSupport
from mmpack.packing.batch import PackedBatch
from mmpack.packing.columns import Column
from mmpack.packing.pack import pack
from mmpack.packing.tensors import to_int32
from mmpack.schema.sample import Sample


def idle_batch(
    like: Sample | str,
    *,
    pad_to_multiple_of: int | None = None,
    loss_columns: Mapping[str, Column] | None = None,
) -> PackedBatch:
    """A pack of no samples (B = 0, N = 0): one row of padding, or `pad_to_multiple_of`, so that a forward can run.

    Its loss is a zero that is attached to the graph, and all its gradients are 0: under FSDP2 or DDP a rank without
    samples runs it, so that all ranks run as many forwards and backwards.

    Args:
        like: a sample of the step, whose teachers the batch has too, with empty lists; or the name of its family.
        loss_columns: name -> values as of any sample: the batch has the same columns, [0] of like dtype.

    Raises: ArgumentError for an unknown family, SchemaError as `pack` for one whose samples can't be packed.

    Example:
        >>> import mmpack as mp
        >>> batch = mp.idle_batch("qwen2_5_vl", loss_columns={"advantages": [0.5]})
        >>> batch.num_tokens, len(batch.input_ids), batch.cu_loss.tolist(), batch.loss_columns["advantages"]
        (0, 1, [0], tensor([]))
    """
    if not (isinstance(like, Sample) or (isinstance(like, str) and like in FAMILIES)):
        shown = repr(like) if isinstance(like, str) else kind_of(like)
        raise ArgumentError(
            f"idle_batch: like is {shown:.60}. Fix: pass a Sample, or the name of a family"
        )
    family = get_family(like if isinstance(like, str) else like.family)
    ids = np.array([family.pad_token_id], dtype=np.int64)
    one = pack(
        [Sample("", "", family.name, ids, [], [], [])], pad_to_multiple_of=pad_to_multiple_of
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    columns = {name: _none_of(values) for name, values in (loss_columns or {}).items()}
    teachers: dict[str, ScoredSupport] = {}
    if isinstance(like, Sample):
        if like.rollout_logprobs is not None:
            columns.setdefault("rollout_logprobs", torch.zeros(0))
        no_lists = ScoredSupport(torch.zeros(1, dtype=torch.int64), nothing, torch.zeros(0))
        teachers = dict.fromkeys(like.teachers or {}, no_lists)
    rows = len(one.input_ids)
    batch = dataclasses.replace(
        one,
        sample_ids=[],
        group_index=nothing,
        rewards=[],
        costs=[],
        verifiers=[],
        token_rows=nothing,
        token_counts=[],
        loss_counts=[],
        cu_loss=to_int32(np.zeros(1, dtype=np.int64)),
        loss_places=dataclasses.replace(one.loss_places, offsets=one.loss_places.offsets[:1]),
        segment_offsets=one.segment_offsets[:1],
        segment_parent=one.segment_parent[:0],
        sample_segment=one.sample_segment[:0],
        cu_seqlens=to_int32(np.array([0, rows])),  # the padding is a sequence
        max_seqlen=rows,
        loss_spans=[],
        loss_columns=columns,
        teachers=teachers,
        num_tokens=0,
    )
    batch.stats |= {"tokens": 0, "tokens_unshared": 0}
    return batch


def _none_of(values: Column) -> torch.Tensor:
    """[0, …], of the dtype and the trailing shape of `values`."""
    return torch.as_tensor(values)[:0]
