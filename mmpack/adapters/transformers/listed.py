"""The policy's logprobs of what teachers scored, beside those of the loss tokens, from one forward of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.transformers import heads
from mmpack.adapters.transformers.head_shards import local_head
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.tower import Features
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import ListedLogprobs, linear_listed_logprobs, listed_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import ScoredSupport, Support
from mmpack.packing.batch import Batch

WHAT = "packed_listed_logprobs"


def packed_listed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, ListedLogprobs]:
    """Logprobs [N] of the loss tokens for `policy_loss`, and those of all ids that `batch.teachers` scored.

    The first are over the batch's kept ids, if it has some; else they are the second's `targets`. The second are over
    the whole vocabulary: `lists` for `distillation_loss`, `targets` for `teacher_advantages`, and the entropy with
    `entropy=True`. One forward of the model and one pass over V make all of them; differentiable.

    Args: see `packed_logprobs`, and so are errors, parallel models, and heads that an adapter changed.
    """
    whole = unwrap(model, WHAT)
    head = heads.head_of(whole)
    inputs = model_inputs(batch, model, vision, features=features, max_patches=max_patches)
    read = _reader(head, batch, temperature, entropy, memory_budget, heads.logit_cap(whole))
    values = heads.read_in_forward(model, whole, head, read, inputs)
    assert isinstance(values, Tensor)
    return _parts(values, batch, entropy)


def _reader(
    head: Any,
    batch: Batch,
    temperature: float,
    entropy: bool,
    memory_budget: int | None,
    cap: float | None,
) -> Callable[[Any], Tensor]:
    """Hidden states [..., H] of the batch's rows -> all values, one after the other as `_parts` cuts them."""
    logits_of = heads.logits_by(head, cap)  # taken now: the caller may exchange it

    def by_weight(hidden: Tensor) -> Tensor:
        own = local_head(head, hidden)
        out = linear_listed_logprobs(
            own.hidden,
            own.weight,
            batch.loss_targets,
            batch.teachers,
            batch.loss_rows,
            own.bias,
            temperature,
            entropy,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
            softcap=cap,
            memory_budget=memory_budget,
            group=own.group,
        )
        if batch.kept_ids is None:
            return torch.cat(_values(out))
        kept = linear_selected_logprobs(
            own.hidden,
            own.weight,
            batch.loss_targets,
            batch.loss_rows,
            own.bias,
            temperature,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
            softcap=cap,
            group=own.group,
            support=batch.kept_ids,
        )
        assert isinstance(kept, Tensor)
        return torch.cat([*_values(out), kept])

    def of_chunk(
        hidden: Tensor, rows: Tensor, targets: Tensor, lists: Mapping[str, Support], kept: Any
    ) -> tuple[Tensor, ...]:
        logits = logits_of(hidden.index_select(0, rows))
        out = listed_logprobs(logits, targets, lists, None, temperature, entropy)
        if kept is None:
            return tuple(_values(out))
        own = selected_logprobs(logits, targets, temperature=temperature, support=kept)
        assert isinstance(own, Tensor)
        return *_values(out), own

    def by_logits(hidden: Tensor) -> Tensor:
        """Of a chunk of loss tokens at a time, and again in backward, so that no more logits exist."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        made = [checkpoint(of_chunk, flat, *chunk, use_reentrant=False) for chunk in _chunks(batch)]
        return torch.cat([torch.cat(parts) for parts in zip(*made, strict=True)])

    return heads.by_weight_or_logits(head, cap, by_weight, by_logits)


def _chunks(batch: Batch) -> Iterator[tuple[Tensor, Tensor, dict[str, ScoredSupport], Any]]:
    rows, targets = batch.loss_rows.split(heads.CHUNK), batch.loss_targets.split(heads.CHUNK)
    counts = [len(part) for part in rows]
    lists = {name: own.split(counts) for name, own in batch.teachers.items()}
    kept = None if batch.kept_ids is None else batch.kept_ids.split(counts)
    for k, (own_rows, own_targets) in enumerate(zip(rows, targets, strict=True)):
        own = {name: parts[k] for name, parts in lists.items()}
        yield own_rows, own_targets, own, None if kept is None else kept[k]


def _values(out: ListedLogprobs) -> list[Tensor]:
    entropy = [] if out.entropy is None else [out.entropy]
    return [out.targets, *out.lists.values(), *entropy]


def _parts(values: Tensor, batch: Batch, entropy: bool) -> tuple[Tensor, ListedLogprobs]:
    """The logprobs for the loss, and the others."""
    count = len(batch.loss_targets)
    sizes = [len(own.ids) for own in batch.teachers.values()]
    sizes = [
        count,
        *sizes,
        *([count] if entropy else []),
        *([] if batch.kept_ids is None else [count]),
    ]
    targets, *rest = values.split(sizes)
    kept = targets if batch.kept_ids is None else rest.pop()
    entropies = rest.pop() if entropy else None
    return kept, ListedLogprobs(targets, dict(zip(batch.teachers, rest, strict=True)), entropies)
