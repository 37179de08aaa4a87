"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.transformers import heads
from mmpack.adapters.transformers.heads import (
    Values,
    head_of,
    local_head,
    logit_cap,
    read_in_forward,
    reader,
)
from mmpack.adapters.transformers.inputs import inputs_of, model_inputs
from mmpack.adapters.transformers.tower import Features
from mmpack.adapters.transformers.ulysses.make import row_split
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import check_flag
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import ListedLogprobs, linear_listed_logprobs, listed_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import ScoredSupport, Support
from mmpack.packing.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: Literal[False] = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor: ...


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    *,
    entropy: bool,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """float32 [N]: log p (natural log) of each loss token under `model`, of a packed or a padded batch; differentiable.

    Pass the outermost wrapper, DistributedDataParallel or DeepSpeed's engine: `ddp.module` trains without reducing
    gradients, which warns. The model's whole forward runs, with its hooks and what was put in its place (accelerate's
    autocast); one that changes the logits which its head makes is refused. A head that `parallelize_module` or
    `tp_plan` split by vocabulary stays split. A head that an adapter changed (LoRA, DoRA), with a forward hook or a
    forward put in the place of its own, or whose logits are capped (Gemma 4), makes logits, of 1,024 loss tokens at a
    time. Under `torch.no_grad()`, for old and reference logprobs, no activations are held: memory is that
    of one layer, however many there are.

    Args:
        temperature: logits are divided by it.
        entropy: return also the entropy [N], in nats, of the distribution that each loss token comes from.
        vision, features, max_patches: see `model_inputs`.
        memory_budget: bytes for the head's probabilities, which the backward then need not compute again; see
            `linear_selected_logprobs`.
        kept_ids: the distribution is that of the batch's kept ids, where it has some: of old, new and reference
            logprobs and of the entropy. False: that of the whole vocabulary.
        sequence_group: ranks that share the rows of this batch, which each of them holds (Ulysses). Every rank gets all
            N values, takes the whole loss of them, and has the gradients of its own rows: their sum over the ranks is
            the gradient. See docs/sequence_parallel.md.

    Raises: as `model_inputs` does; ModelError for what is no transformers model; ArgumentError.
    """
    check_flag("packed_logprobs", "kept_ids", kept_ids)
    whole = unwrap(model, "packed_logprobs")
    head = head_of(whole)
    split = row_split(batch, model, sequence_group, "packed_logprobs")
    own = batch if split is None else split.own_loss(batch)
    inputs = inputs_of(batch, model, vision, features, max_patches, split)
    read = reader(head, own, temperature, entropy, memory_budget, kept_ids, logit_cap(whole))
    return _gathered(read_in_forward(model, whole, head, read, inputs), split)


def _gathered(values: Values, split: RowSplit | None) -> Values:
    """Those of all ranks' loss tokens, where rows are split."""
    if split is None:
        return values
    if torch.is_tensor(values):
        return split.gather(values)
    logprobs, entropies = split.gather(torch.stack(values, dim=1)).unbind(1)
    return logprobs.contiguous(), entropies.contiguous()


# ---- what teachers scored ---------------------------------------------------------------------------

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
