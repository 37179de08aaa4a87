"""The media of a split batch: each is encoded on one rank, and its features go to the ranks that hold its placeholders.

Gradients go the same way back. A rank with no medium of a modality encodes the smallest one, of weight 0: every rank
calls the tower as often, has the same collectives, and gradients of the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.adapters.transformers.media_inputs import Encoded, encoder_outputs, zero_of
from mmpack.adapters.transformers.tower import (
    Features,
    Idle,
    encode_some,
    has_sharded_tower,
    kept_or_encoded,
)
from mmpack.adapters.transformers.ulysses.split import RowSplit, send_rows
from mmpack.cache.tower import Levels
from mmpack.families import Family
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import PackedBatch
from mmpack.packing.calls import NONE, Counts, calls_of, counts_of, most_of


def split_inputs(
    batch: PackedBatch,
    model: Any,
    ids: Tensor,
    split: RowSplit,
    features: Features | None = None,
    max_patches: int | None = None,
    joined: bool = False,
    least: Counts = NONE,
) -> dict[str, Any]:
    """Keywords of the forward of this rank's rows, as `encoded_inputs` makes those of all. ids [1, t]: its own.

    `batch.stats["patches_encoded"]` becomes the patches that this rank's tower ran. All of them run before the first
    exchange, in the forward and so in the backward: ranks with other media have their collectives in one order.
    """
    family = batch.family_of()
    owner = share_media([m.num_patches for m in batch.media], split.ranks)
    labels = np.array(
        [
            "image" if family.video_bounds and m.modality == "video" else m.modality
            for m in batch.media
        ]
    )
    mine = np.flatnonzero(owner == split.rank).tolist()
    idle = Idle(_runs(batch, model, owner, split.ranks, max_patches, least))
    made = dict(zip(mine, _encoded(batch, model, mine, features, max_patches, idle), strict=True))
    outputs: dict[str, Any] = {}
    for label in [name for name in family.placeholder_ids if name in labels]:
        chosen, heard = labels == label, label == "audio"
        own = [i for i in mine if chosen[i]]
        # or any of its tower, of which no row is read
        alike = [made[i] for i in mine if heard == (labels[i] == "audio")]
        given = [made[i] for i in own] or alike[:1]
        given = given or [idle.features["audio" if heard else "image"]]
        levels = [torch.cat(level) for level in zip(*given, strict=True)]
        if not outputs:
            seen = [batch.media[i] for i in mine]
            levels[0] = levels[0] + zero_of(model, joined, idle, levels[0], seen)
        outputs[label] = _encoded_rows(batch, split, levels, own, owner, chosen, family)
    return encoder_outputs(model, family, ids, outputs)


def share_media(patches: Sequence[int], ranks: int) -> np.ndarray:
    """[M]: the rank that encodes each medium. The largest first, each where the fewest patches are."""
    owner, load = np.zeros(len(patches), dtype=np.int64), [0] * ranks
    for i in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        owner[i] = min(range(ranks), key=lambda r: (load[r], r))
        load[owner[i]] += patches[i]
    return owner


def _runs(
    batch: PackedBatch,
    model: Any,
    owner: np.ndarray,
    ranks: int,
    max_patches: int | None,
    least: Counts,
) -> Counts:
    """How often each tower runs on a rank, at least: once where a rank has media for it, so that all have its graph.

    A sharded one as often as on the rank that runs it most.
    """
    parts = [
        [m for m, r in zip(batch.media, owner, strict=True) if r == rank] for rank in range(ranks)
    ]
    family = batch.family_of()
    most = most_of(counts_of(calls_of(family, part, max_patches)) for part in parts)
    if not has_sharded_tower(model):
        most = Counts(*(min(n, 1) for n in most))
    return most_of([least, most])


def _encoded(
    batch: PackedBatch,
    model: Any,
    mine: list[int],
    features: Features | None,
    max_patches: int | None,
    idle: Idle,
) -> list[Levels]:
    """Features of `mine`; `idle` gets what is missing of its runs."""
    batch.stats["patches_encoded"] = 0

    def encode(places: list[int], idle: Idle | None = None) -> list[Levels]:
        own = [mine[i] for i in places]
        batch.stats["patches_encoded"] += sum(batch.media[i].num_patches for i in own)
        return encode_some(model, batch, own, max_patches, idle)

    if features is None:
        made = encode(list(range(len(mine))), idle)
    else:
        made = kept_or_encoded(model, batch, mine, features, encode) if mine else []
        heard = [batch.media[i].modality == "audio" for i in mine]
        vision, audio = idle.least
        idle.least = Counts(0 if False in heard else vision, 0 if True in heard else audio)
        encode([], idle)
    batch.stats["patches_encoded"] += idle.patches
    return made


def _encoded_rows(
    batch: PackedBatch,
    split: RowSplit,
    levels: list[Tensor],
    mine: list[int],
    owner: np.ndarray,
    chosen: np.ndarray,
    family: Family,
) -> Encoded:
    """What the forward reads for this rank's placeholders of the `chosen` media, of which it has made `mine`.

    levels [rows, H]: features of `mine`, one after the other; of anything if there are none.
    """
    first, *rest = exchange_features(batch, split, levels, mine, owner, chosen)
    if family.pixel_layout == "tiles" and family.tokens_by_size is None:
        # which the forward reads as one tensor
        return Encoded(pooler_output=first[None])
    return Encoded(pooler_output=(first,), deepstack_features=[(level,) for level in rest] or None)


def exchange_features(
    batch: PackedBatch,
    split: RowSplit,
    levels: list[Tensor],
    mine: list[int],
    owner: np.ndarray,
    chosen: np.ndarray,
) -> list[Tensor]:
    """Features and deepstack levels of this rank's placeholders, in row order; arguments as in `_encoded_rows`."""
    offsets = np.cumsum([0, *(m.num_tokens for m in batch.media)])
    feature = batch.vision_rows.features.cpu().numpy().astype(np.int64)
    medium = np.searchsorted(offsets[1:], feature, side="right")
    reader, sender = split.rank_of(batch.vision_rows.rows.cpu().numpy()), owner[medium]
    used = chosen[medium]
    start = np.zeros(len(batch.media), dtype=np.int64)  # of each of `mine` among what was made
    start[mine] = np.cumsum([0, *(batch.media[i].num_tokens for i in mine)])[: len(mine)]

    going = np.flatnonzero(used & (sender == split.rank))
    going = going[np.argsort(reader[going], kind="stable")]
    coming = np.flatnonzero(used & (reader == split.rank))
    order = np.argsort(np.argsort(sender[coming], kind="stable"))  # by sender -> by row
    sent = np.bincount(reader[going], minlength=split.ranks).tolist()
    received = np.bincount(sender[coming], minlength=split.ranks).tolist()
    index = start[medium[going]] + feature[going] - offsets[medium[going]]

    widths = [level.shape[1] for level in levels]
    joined = torch.cat(levels, dim=1)
    out = gather_rows(joined, torch.from_numpy(index).to(joined.device))
    got = send_rows(out, sent, received, split.group)[torch.from_numpy(order).to(joined.device)]
    return list(got.split(widths, dim=1))
