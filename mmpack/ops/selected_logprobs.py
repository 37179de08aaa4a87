"""Logprobs of N loss tokens from logits that exist: [T, V] in, [N] out, in chunks of a fixed row count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError
from mmpack.ops.rows import Slots, check_arguments, gather_gradients, make_slots
from mmpack.ops.softmax import pad_columns, row_gradient, row_statistics, target_gradient

CHUNK_ROWS = 64


def selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    rows_unique: Tensor | None = None,
    row_inverse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of each target, natural log.

    Args:
        logits: [T, V], any float dtype. Rows that are not read may hold anything, NaN included.
        targets: [N] int64 token ids.
        rows: [N] row that predicts each target, in any order, with repeats; None: row n predicts target n.
        entropy: also return the entropy of each row's distribution, in nats.
        rows_unique, row_inverse: [R], [N], `rows` as its distinct values (`PackedBatch.loss_rows_unique`,
            `.loss_row_inverse`): then what repeats is read once.

    Returns [N] float32 (float64 for float64 logits), or (logprobs, entropy). The gradient to the logits is dense,
    exactly 0 in rows that are not read or whose incoming gradients are all 0; gradients of one row are summed in
    the order of n. Values and gradients of a row are the same bits in any batch and order.

    Raises ArgumentError for wrong shapes, and on the CPU for indices out of range; on a GPU those end in the
    device's own assertion, because looking would wait for it.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"selected_logprobs: logits has shape {list(logits.shape)} and dtype {logits.dtype}, expected a float "
            f"[T, V]. Fix: drop the batch dimension, e.g. logits[0]"
        )
    num_rows, vocab = logits.shape
    check_arguments(
        "selected_logprobs", (num_rows, vocab), targets, rows, rows_unique, row_inverse, temperature
    )
    slots = make_slots(
        num_rows, len(targets), logits.device, rows, rows_unique, row_inverse, CHUNK_ROWS
    )
    logprobs, entropies = _SelectedLogprobs.apply(
        logits, targets.long(), *slots, float(temperature), entropy
    )
    return (logprobs, entropies) if entropy else logprobs


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        slot_rows: Tensor,
        slot_writes: Tensor,
        slot_of: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        slots = Slots(slot_rows, slot_writes, slot_of)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        maximum, log_total, row_entropy = (
            torch.empty(len(slots.rows), dtype=dtype, device=logits.device) for _ in range(3)
        )
        for start in range(0, len(slots.rows), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            x = _read(logits, slots.rows[chunk], dtype)
            maximum[chunk], log_total[chunk], h = row_statistics(x, temperature, entropy)
            if h is not None:
                row_entropy[chunk] = h
        # [N] values alone: float64 costs nothing and leaves one rounding.
        chosen = logits[slots.rows[slots.of], targets].double() - maximum[slots.of].double()
        logprobs = (chosen / temperature - log_total[slots.of].double()).to(dtype)

        ctx.save_for_backward(logits, targets, *slots, maximum, log_total, row_entropy, logprobs)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprobs, row_entropy[slots.of] if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> Any:
        logits, targets, *slot_parts, maximum, log_total, row_entropy, logprobs = ctx.saved_tensors
        slots, entropy = Slots(*slot_parts), row_entropy if ctx.entropy else None
        num_rows, vocab = logits.shape
        gradients = gather_gradients(grad_logprobs, grad_entropy, slots, targets, vocab)

        grad = logits.new_zeros(num_rows + 1, vocab)
        for start in range(0, len(slots.rows), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            x = _read(logits, slots.rows[chunk], maximum.dtype)
            h = None if entropy is None else entropy[chunk]
            x = row_gradient(
                x, maximum[chunk], log_total[chunk], h, gradients, chunk, ctx.temperature
            )
            grad[slots.writes[chunk]] = x[:, :vocab].to(grad.dtype)
        at_targets = target_gradient(logprobs, entropy, gradients, slots, ctx.temperature)
        grad[slots.rows[slots.of], targets] = at_targets.to(grad.dtype)
        return grad[:num_rows], None, None, None, None, None, None


def _read(logits: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a fresh [C, V padded] tensor; padding columns hold -inf."""
    x = logits.index_select(0, rows).to(dtype)
    padding = pad_columns(x.shape[1])
    return torch.nn.functional.pad(x, (0, padding), value=-torch.inf) if padding else x
