"""The split of a batch over a process group, and what of models and batches can't be split."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmpack.adapters.transformers.compile import are_compiled
from mmpack.adapters.transformers.modules import decoder_layers
from mmpack.adapters.transformers.tower import media_names
from mmpack.adapters.transformers.ulysses.split import KEYWORD, RowSplit
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.packing.batch import Batch, PackedBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def row_split(batch: Batch, model: Any, group: ProcessGroup | None, what: str) -> RowSplit | None:
    """The split over `group`; None for no group, or one of a single rank. A GPU is waited for: loss rows are read.

    Raises: ArgumentError, as `what`, for what is no group, or where its ranks hold different batches; ModelError for
    what can't be split.
    """
    if group is None:
        return None
    from torch.distributed import ProcessGroup

    if not isinstance(group, ProcessGroup):
        raise ArgumentError(
            f"{what}: sequence_group is {kind_of(group)}. Fix: pass a ProcessGroup, as mesh['sp'].get_group()"
        )
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if rank < 0:
        raise ArgumentError(
            f"{what}: this process is not in sequence_group. Fix: pass this process's own group"
        )
    if ranks == 1:
        return None
    if not isinstance(batch, PackedBatch):
        raise ModelError(
            f"{what}: a padded batch can't be split by rows over sequence_group. Fix: use mp.pack"
        )
    _refuse_unsplit(unwrap(model, what), ranks, what)
    return split_rows(batch, group, what)


def split_rows(batch: PackedBatch, group: ProcessGroup, what: str) -> RowSplit | None:
    """`row_split` for a model that was checked."""
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    total = len(batch.input_ids)
    if total < ranks and not batch.media and not len(batch.loss_rows):
        return None  # an idle batch: gradients are 0 wherever it runs
    if total < ranks:
        raise ModelError(
            f"{what}: the batch has {total} rows for {ranks} ranks of sequence_group. "
            "Fix: pack more samples, or pass pad_to_multiple_of"
        )
    _refuse_unlike(batch, ranks, group, what)
    bounds = tuple(total * r // ranks for r in range(ranks + 1))
    rows = batch.loss_rows.cpu().numpy()
    return RowSplit(group, rank, bounds, np.searchsorted(bounds[1:], rows, side="right"))


def cut_in_decoder(model: Any) -> None:
    """Let the text model keep this rank's rows where its caller, which encodes media, has all of them. It stays."""
    decoder = unwrap(model, "model_inputs").get_decoder()
    if cut_rows not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(cut_rows, with_kwargs=True, prepend=True)


def cut_rows(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The hook: embeddings [1, T, H], positions [..., T], and where pictures are with their deepstack levels."""
    split: RowSplit | None = kwargs.get(KEYWORD)
    rows = kwargs.get("inputs_embeds")
    if split is None or rows is None or rows.shape[1] != split.bounds[-1]:
        return None
    own = split.own
    cut = {"inputs_embeds": rows[:, own], "position_ids": kwargs["position_ids"][..., own]}
    seen = kwargs.get("visual_pos_masks")
    if seen is not None:
        start, count = int(seen[:, : own.start].sum()), int(seen[:, own].sum())
        levels = kwargs["deepstack_visual_embeds"]
        cut["visual_pos_masks"] = seen[:, own]
        cut["deepstack_visual_embeds"] = [level[start : start + count] for level in levels]
    return args, kwargs | cut


def _refuse_unsplit(whole: Any, ranks: int, what: str) -> None:
    text = whole.config.get_text_config()
    heads = {"num_attention_heads": text.num_attention_heads}
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        heads["linear_num_value_heads"] = text.linear_num_value_heads
    for name, count in heads.items():
        if count % ranks:
            raise ModelError(
                f"{what}: {name} is {count}, which {ranks} ranks of sequence_group don't divide. "
                "Fix: use a group of fewer ranks"
            )
    if are_compiled(decoder_layers(whole)):
        raise ModelError(
            f"{what}: the model's layers are compiled, and heads are exchanged within them. "
            "Fix: leave out compile_layers or sequence_group"
        )


def _refuse_unlike(batch: PackedBatch, ranks: int, group: ProcessGroup, what: str) -> None:
    """Raise where the ranks hold different batches, whose rows would be mixed: on all of them alike."""
    digest = hashlib.sha256(repr(media_names(batch)).encode())
    for part in (batch.input_ids, batch.visible_until, batch.loss_rows, batch.loss_targets):
        digest.update(f"{list(part.shape)}".encode() + part.cpu().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).to(batch.device)
    found = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(found, mine, group=group)
    if odd := [r for r, x in enumerate(found) if not torch.equal(x, found[0])]:
        raise ArgumentError(
            f"{what}: ranks 0 and {odd[0]} of sequence_group hold different batches. "
            "Fix: shard the data over the mesh's other dimension, and pack the same samples on all ranks of a group"
        )
