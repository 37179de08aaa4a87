"""What of a batch travels through a forward of Megatron's: an object in the place of its `packed_seq_params`.

Model, layers and checkpoints hand `packed_seq_params` on as they got it. So each micro-batch of a pipeline has its own
rule, and layers that are run again for the backward get the one of their forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.ops.attention import AttentionPlan
from mmpack.packing.batch import PackedBatch


class Alone:
    """A context-parallel group of one rank, as rotary embeddings ask it: positions are those of own rows already."""

    def size(self) -> int:
        return 1


@dataclass(kw_only=True)
class Rows(PackedSeqParams):  # type: ignore[misc]
    """A batch's rule, and what of its rows is this rank's. T rows of all ranks, t of this one."""

    batch: PackedBatch
    plan: AttentionPlan
    split: RowSplit | None  # over context parallel ranks
    ids: Tensor  # [1, t]
    positions: Tensor  # [3, 1, t] for mRoPE, else [1, t]
    weights: Tensor  # float32 [t]: of how many samples a row is
    routes: Tensor | None  # [t, layers, k]

    @classmethod
    def of(cls, batch: PackedBatch, split: RowSplit | None, mrope: bool, **more: Any) -> Rows:
        """Of a batch that was checked."""
        own = slice(None) if split is None else split.own
        total = len(batch.input_ids)
        rows = batch.position_ids[:, None]
        if mrope:
            rows = rows[1:] if len(rows) > 1 else rows.expand(3, -1, -1)
        routes = batch.routed_experts
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=batch.cu_loss[:1],  # not read: mbridge asks whether there are any
            cu_seqlens_kv=batch.cu_loss[:1],
            max_seqlen_q=total,  # which tables of positions are made for
            max_seqlen_kv=total,
            cp_group=Alone(),
            batch=batch,
            split=split,
            ids=batch.input_ids[None, own],
            positions=rows[..., own] if mrope else rows[0, :, own],
            weights=torch.bincount(batch.token_rows, minlength=total)[own].float(),
            routes=None if routes is None else routes[own],
            **more,
        )
