"""The head that a model's logits come from now: a plain Linear is read by its weight, any other is run.

PEFT puts modules of its own there: a copy that is trained (`modules_to_save`), or a Linear with an adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.transformers.head_shards import (
    is_split,
    local_head,
    refuse_split,
)
from mmpack.errors import ArgumentError, kind_of
from mmpack.families import family_of_config
from mmpack.ops.linear_logprobs.linear import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import Support
from mmpack.packing.batch import Batch

CHUNK = 1024  # loss tokens whose logits exist at once
Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def head_of(whole: Any) -> Any:
    """The module whose forward makes the logits; of PEFT's `modules_to_save` the copy that is in use."""
    head = whole.get_output_embeddings()
    while type(head).__name__ == "ModulesToSaveWrapper":
        active, copies = head.active_adapters, head.modules_to_save
        used = active and not head.disable_adapters and all(name in copies for name in active)
        head = copies[active[0]] if used else head.original_module
    return head


def logit_cap(whole: Any) -> float | None:
    """The bound that the model's forward puts on what its head makes, cap · tanh(logits / cap), if it does so."""
    name = family_of_config(whole.config).logit_cap
    return None if name is None else getattr(whole.config.get_text_config(), name)


def capped(
    logits_of: Callable[[Any], torch.Tensor], cap: float | None
) -> Callable[[Any], torch.Tensor]:
    """`logits_of`, and the cap after it, as the model's forward does."""
    if cap is None:
        return logits_of
    return lambda hidden: torch.tanh(logits_of(hidden) / cap) * cap


@contextlib.contextmanager
def uncapped(whole: Any) -> Iterator[None]:
    """The model's forward leaves what its head makes as it is, within the block."""
    cap, name = logit_cap(whole), family_of_config(whole.config).logit_cap
    if cap is None:
        yield
        return
    config = whole.config.get_text_config()
    setattr(config, str(name), None)
    try:
        yield
    finally:
        setattr(config, str(name), cap)


def reader(
    head: Any,
    batch: Batch,
    temperature: float,
    entropy: bool,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    cap: float | None = None,
) -> Callable[[Any], Values]:
    """Hidden states [..., H] of the batch's rows -> logprobs [N], or (logprobs, entropies), by this head.

    `cap`: of the model's logits; they are made then, unless ranks share the vocabulary.

    `memory_budget`: of a head that is read by its weight. `kept_ids`: over those of the batch, if it has some.
    """
    logits_of = capped(head.forward, cap)  # taken now: the caller may exchange it
    support = batch.kept_ids if kept_ids else None
    _check_kept(support, len(batch.loss_targets))

    def by_weight(hidden: torch.Tensor) -> Values:
        own = local_head(head, hidden, batch.input_ids.numel())
        return linear_selected_logprobs(
            own.hidden,
            own.weight,
            batch.loss_targets,
            rows=batch.loss_rows,
            bias=own.bias,
            temperature=temperature,
            entropy=entropy,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
            softcap=cap,
            memory_budget=memory_budget,
            group=own.group,
            support=support,
        )

    def of_chunk(
        hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, lists: Support | None
    ) -> Values:
        logits = logits_of(hidden.index_select(0, rows))
        return selected_logprobs(
            logits, targets, temperature=temperature, entropy=entropy, support=lists
        )

    def by_logits(hidden: torch.Tensor) -> Values:
        """Of a chunk of loss tokens at a time, and again in backward, so that no more logits exist."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows, targets = batch.loss_rows.split(CHUNK), batch.loss_targets.split(CHUNK)
        lists = [None] * len(rows) if support is None else support.split([len(r) for r in rows])
        chunks = zip(rows, targets, lists, strict=True)
        made = [checkpoint(of_chunk, flat, *chunk, use_reentrant=False) for chunk in chunks]
        if entropy:
            logprobs, entropies = zip(*made, strict=True)
            return torch.cat(logprobs), torch.cat(entropies)
        return torch.cat(made)

    return by_weight_or_logits(head, cap, by_weight, by_logits)


def by_weight_or_logits(
    head: Any, cap: float | None, by_weight: Callable[[Any], Any], by_logits: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """The one that fits the head when its forward runs: FSDP2 gathers its weight then, and tensor parallel does not."""

    def read(hidden: Any) -> Any:
        if is_linear(head) and (cap is None or is_split(head)):
            return by_weight(hidden)
        refuse_split(head)
        return by_logits(hidden)

    return read


def _check_kept(support: Any, count: int) -> None:
    """Raise ArgumentError for kept ids, put into a batch by hand, that are no `count` lists: they are cut in chunks."""
    if support is None or (isinstance(support, Support) and len(support) == count):
        return
    what = f"{len(support)} lists" if isinstance(support, Support) else kind_of(support)
    raise ArgumentError(
        f"packed_logprobs: kept_ids is {what}, expected a Support of {count} lists, one per loss token. "
        "Fix: pass batch.kept_ids, as mp.pack made it"
    )


def is_linear(head: Any) -> bool:
    """Whether the head's weight and bias say all; `fully_shard` makes a class of its own."""
    kinds = [k for k in type(head).__mro__ if not k.__module__.startswith("torch.distributed.")]
    return kinds[0] is torch.nn.Linear
