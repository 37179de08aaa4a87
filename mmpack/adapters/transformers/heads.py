"""The head that a model's logits come from now: a plain Linear is read by its weight, any other is run.

PEFT puts modules of its own there: a copy that is trained (`modules_to_save`), or a Linear with an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mmpack.ops.linear_logprobs.linear import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
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


def reader(
    head: Any, batch: Batch, temperature: float, entropy: bool, memory_budget: int | None = None
) -> Callable[[Any], Values]:
    """Hidden states [..., H] of the batch's rows -> logprobs [N], or (logprobs, entropies), by this head.

    `memory_budget`: of a head that is read by its weight.
    """
    logits_of = head.forward  # taken now: the caller may exchange it

    def by_weight(hidden: torch.Tensor) -> Values:
        return linear_selected_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            head.weight,
            batch.loss_targets,
            rows=batch.loss_rows,
            bias=head.bias,
            temperature=temperature,
            entropy=entropy,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
            memory_budget=memory_budget,
        )

    def of_chunk(hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> Values:
        logits = logits_of(hidden.index_select(0, rows))
        return selected_logprobs(logits, targets, temperature=temperature, entropy=entropy)

    def by_logits(hidden: torch.Tensor) -> Values:
        """Of a chunk of loss tokens at a time, and again in backward, so that no more logits exist."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        chunks = zip(batch.loss_rows.split(CHUNK), batch.loss_targets.split(CHUNK), strict=True)
        made = [checkpoint(of_chunk, flat, *chunk, use_reentrant=False) for chunk in chunks]
        if entropy:
            logprobs, entropies = zip(*made, strict=True)
            return torch.cat(logprobs), torch.cat(entropies)
        return torch.cat(made)

    return by_weight if _is_linear(head) else by_logits


def _is_linear(head: Any) -> bool:
    """Whether the head's weight and bias say all; `fully_shard` makes a class of its own."""
    kinds = [k for k in type(head).__mro__ if not k.__module__.startswith("torch.distributed.")]
    return kinds[0] is torch.nn.Linear
