"""Log-probabilities of a batch's loss tokens by a Megatron model: the vocabulary stays split, logits are never made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmpack.adapters.megatron.inputs import model_inputs
from mmpack.adapters.megatron.modules import other_forward, unwrap
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.transformers.heads import Asked, Head, listed_of, values_by_weight
from mmpack.adapters.transformers.ulysses.split import gather_parts
from mmpack.errors import ModelError, check_flag
from mmpack.packing.batch import Batch, PackedBatch


def packed_logprobs(
    model: Any,
    batch: PackedBatch,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    memory_budget: int | None = None,
    kept_ids: bool = True,
) -> Any:
    """float32 [N] on the last pipeline stage: log p (natural log) of each loss token; differentiable.

    On other stages what the model's forward returned, [t, 1, H], for the schedule to send on: return it from
    `forward_step` either way. Pass the outermost wrapper, so that its hooks run. Every tensor and context parallel rank
    gets all N values and takes the whole loss of them. Gradients are those that Megatron expects: sums over context
    parallel ranks are the gradient, as its own loss functions, which see their own rows, have it. The padded ids of a
    vocabulary count, as in Megatron's own loss.

    Args: temperature, entropy ([N] too, as second), memory_budget, kept_ids: as in
    `mmpack.adapters.transformers.packed_logprobs`.
    Raises: as `model_inputs`; ModelError for a model whose forward does not run its head.
    """
    check_flag("packed_logprobs", "kept_ids", kept_ids)
    asked = Asked(temperature, entropy, memory_budget, kept_ids)
    values, last = _read(model, batch, asked)
    if not last or not entropy:
        return values
    logprobs, entropies = values.chunk(2)
    return logprobs, entropies


def packed_listed_logprobs(
    model: Any,
    batch: PackedBatch,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    memory_budget: int | None = None,
) -> Any:
    """`packed_logprobs` and, by the same pass, those of all ids that `batch.teachers` scored: (Tensor, ListedLogprobs).

    See `mmpack.adapters.transformers.packed_listed_logprobs`. Raises: as `packed_logprobs`, and ModelError under
    context parallelism.
    """
    if unwrap(model, "packed_listed_logprobs")[1].pg_collection.cp.size() > 1:
        raise ModelError(
            "packed_listed_logprobs: lists are not gathered over context parallel ranks. "
            "Fix: use tensor and sequence parallelism, or packed_logprobs"
        )
    values, last = _read(model, batch, Asked(temperature, entropy, memory_budget, teachers=True))
    return listed_of(values, batch, entropy) if last else values


def _read(model: Any, batch: PackedBatch, asked: Asked) -> tuple[Tensor, bool]:
    """Values one after the other, or another stage's output; whether it is the former."""
    _, language = unwrap(model, "packed_logprobs")
    inputs = model_inputs(batch, model)
    rows: Rows = inputs["packed_seq_params"]
    if not language.post_process:
        return model(**inputs), False
    own = batch if rows.split is None else rows.split.own_loss(batch)
    head, group, made = language.output_layer, language.pg_collection.tp, []
    ranks = group if group.size() > 1 else None
    pick, own = _picked(own, len(rows.weights), group) if head.sequence_parallel else (None, own)

    def read(hidden: Tensor, weight: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
        flat = hidden[:, 0] if pick is None else pick(hidden[:, 0])
        given = Head(flat, head.weight if weight is None else weight, None, ranks)
        values = values_by_weight(given, own, asked)
        made.append(values)
        return values[:, None, None], None

    with other_forward(head, read):
        model(**inputs)
    if len(made) != 1:
        raise ModelError(
            f"packed_logprobs: the model's forward runs its head {len(made)} times. Fix: leave out what changed it"
        )
    values: Tensor = made[0]
    if rows.split is not None:
        kinds = 1 + bool(asked.entropy)
        parts = (
            values.unflatten(0, (kinds, -1))
            if len(values)
            else values.new_zeros(kinds, 0) + values.sum()
        )
        values = rows.split.gather(parts.T.contiguous()).T.flatten()
    return values, True


def _picked(batch: Batch, rows: int, group: Any) -> tuple[Callable[[Tensor], Tensor], Batch]:
    """This rank's hidden states -> those of all rows of the loss; and the batch, whose loss rows are places there.

    Ranks of `group` share `rows` in order. A GPU is waited for.
    """
    unique, each = batch.loss_rows_unique.long(), rows // group.size()
    owner = unique // each
    counts = torch.bincount(owner, minlength=group.size()).tolist()
    order = torch.arange(len(unique), device=unique.device)
    own = (owner == group.rank()).nonzero()[:, 0]
    mine = unique[own] - group.rank() * each

    def pick(hidden: Tensor) -> Tensor:
        return gather_parts(hidden[mine], order, own, counts, group)

    places: dict[str, Any] = {
        "loss_rows": batch.loss_row_inverse,
        "loss_rows_unique": order.to(torch.int32),
    }
    return pick, dataclasses.replace(batch, **places)
