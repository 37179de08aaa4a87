"""Logprobs of N loss tokens from hidden states [T, H] and the output weight [V, H]; [T, V] logits never exist.

Chunks of a fixed row count, each in blocks of the vocabulary; products are summed in fp32 whatever the inputs are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError
from mmpack.ops.rows import Slots, check_arguments, gather_gradients, make_slots
from mmpack.ops.softmax import pad_columns, row_gradient, row_statistics, target_gradient

CHUNK_ROWS_CPU = 64
CHUNK_ROWS_GPU = 256
BLOCK_COLUMNS = 16384  # of the vocabulary: bounds what is upcast or summed at a time


def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    rows_unique: Tensor | None = None,
    row_inverse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax((hidden · weightᵀ + bias) / temperature) of each target, natural log, without the logits.

    Args:
        hidden: [T, H], any float dtype. Rows that are not read may hold anything, NaN included.
        weight, bias: [V, H], [V]: the output embedding.
        targets, rows, rows_unique, row_inverse, entropy: see `selected_logprobs`.

    Returns [N] float32 (float64 for float64 inputs), or (logprobs, entropy in nats). Backward computes the logits
    again, chunk by chunk. The gradient to `hidden` is exactly 0 in rows that are not read or whose incoming
    gradients are all 0; it and the values are the same bits in any batch and order. Gradients to weight and bias
    are summed in fp32 before they are cast.

    On a GPU bf16 products run in bf16 with fp32 sums; fp32 products obey `torch.set_float32_matmul_precision`, and
    the numerical contract needs its default, "highest".

    Raises ArgumentError for wrong shapes, and on the CPU for indices out of range.
    """
    what = "linear_selected_logprobs"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"{what}: hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}, expected [T, H] and "
            f"[V, H]. Fix: drop the batch dimension; weight is lm_head.weight"
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ArgumentError(
            f"{what}: hidden is {hidden.dtype} and weight {weight.dtype}, expected float dtypes. "
            f"Fix: pass hidden states, not ids or quantised weights"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{what}: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]. Fix: one a vocabulary entry"
        )
    check_arguments(
        what,
        (hidden.shape[0], weight.shape[0]),
        targets,
        rows,
        rows_unique,
        row_inverse,
        temperature,
    )
    chunk = CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS_GPU
    slots = make_slots(
        hidden.shape[0], len(targets), hidden.device, rows, rows_unique, row_inverse, chunk
    )
    logprobs, entropies = _LinearSelectedLogprobs.apply(
        hidden, weight, bias, targets.long(), *slots, float(temperature), entropy, chunk
    )
    return (logprobs, entropies) if entropy else logprobs


class _LinearSelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        slot_rows: Tensor,
        slot_writes: Tensor,
        slot_of: Tensor,
        temperature: float,
        entropy: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        slots = Slots(slot_rows, slot_writes, slot_of)
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        maximum, log_total, row_entropy = (
            torch.empty(len(slots.rows), dtype=dtype, device=hidden.device) for _ in range(3)
        )
        chosen = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        product = _product_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(slots.rows), chunk_rows):
                chunk = slice(start, start + chunk_rows)
                z = _logits(hidden.index_select(0, slots.rows[chunk]), weight, bias, product)
                inside, place = _tokens_of(slots, start, chunk_rows)
                chosen = torch.where(inside, z[place, targets], chosen)
                maximum[chunk], log_total[chunk], h = row_statistics(z[:-1], temperature, entropy)
                if h is not None:
                    row_entropy[chunk] = h
        shifted = (chosen.double() - maximum[slots.of].double()) / temperature
        logprobs = (shifted - log_total[slots.of].double()).to(dtype)

        ctx.save_for_backward(
            hidden, weight, bias, targets, *slots, maximum, log_total, row_entropy, logprobs
        )
        ctx.temperature, ctx.entropy, ctx.chunk_rows = temperature, entropy, chunk_rows
        return logprobs, row_entropy[slots.of] if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, targets, *slot_parts = ctx.saved_tensors[:-4]
        maximum, log_total, row_entropy, logprobs = ctx.saved_tensors[-4:]
        slots, entropy = Slots(*slot_parts), row_entropy if ctx.entropy else None
        (num_rows, width), vocab, dtype = hidden.shape, weight.shape[0], maximum.dtype
        gradients = gather_gradients(grad_logprobs, grad_entropy, slots, targets, vocab)
        at_targets = target_gradient(logprobs, entropy, gradients, slots, ctx.temperature).to(dtype)

        product = _product_dtype(hidden, weight)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = hidden.new_zeros(num_rows + 1, width) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(slots.rows), ctx.chunk_rows):
                chunk = slice(start, start + ctx.chunk_rows)
                x = hidden.index_select(0, slots.rows[chunk])
                z = _logits(x, weight, bias, product)
                h = None if entropy is None else entropy[chunk]
                row_gradient(
                    z[:-1], maximum[chunk], log_total[chunk], h, gradients, chunk, ctx.temperature
                )
                _, place = _tokens_of(slots, start, ctx.chunk_rows)
                z[place, targets] = at_targets
                grad_z = z[:-1]
                if grad_hidden is not None:
                    grad_hidden[slots.writes[chunk]] = _times_weight(grad_z, weight, product).to(
                        hidden.dtype
                    )
                if grad_weight is not None:
                    x = x.masked_fill(~gradients.live[chunk, None], 0.0)
                    for block in _blocks(vocab):
                        grad_weight[block] += _product(grad_z[:, block].T, x, product)
                if grad_bias is not None:
                    grad_bias += grad_z[:, :vocab].sum(0)
        return (
            None if grad_hidden is None else grad_hidden[:num_rows],
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
        )


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, product: torch.dtype) -> Tensor:
    """Logits of a chunk x [C, H] as [C + 1, V padded]; padding columns hold -inf, the last row is scratch."""
    vocab = weight.shape[0]
    shape = len(x) + 1, vocab + pad_columns(vocab)
    z = torch.empty(shape, dtype=torch.promote_types(product, torch.float32), device=x.device)
    z[:, vocab:] = -torch.inf
    for block in _blocks(vocab):
        z[:-1, block] = _product(x, weight[block].T, product)
        if bias is not None:
            z[:-1, block] += bias[block]
    return z


def _times_weight(grad_z: Tensor, weight: Tensor, product: torch.dtype) -> Tensor:
    """grad_z [C, V padded] · weight [V, H], summed over blocks of the vocabulary in a fixed order."""
    total = grad_z.new_zeros(len(grad_z), weight.shape[1])
    for block in _blocks(weight.shape[0]):
        total += _product(grad_z[:, block], weight[block], product)
    return total


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What factors are cast to: on a GPU bf16 stays bf16, all else is at least float32."""
    if hidden.device.type != "cpu" and hidden.dtype == weight.dtype == torch.bfloat16:
        return torch.bfloat16
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _product(a: Tensor, b: Tensor, product: torch.dtype) -> Tensor:
    """a · b with sums and result of float32 or better.

    Columns are padded to whole lanes: with fewer than 12 of them MKL sums a row by its place among the others.
    """
    a, b = a.to(product), b.to(product)
    columns = b.shape[1]
    padding = pad_columns(columns)
    if padding:
        b = torch.nn.functional.pad(b, (0, padding))
    if product == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)[:, :columns]
    return torch.mm(a, b)[:, :columns]


def _blocks(vocab: int) -> list[slice]:
    return [slice(i, min(i + BLOCK_COLUMNS, vocab)) for i in range(0, vocab, BLOCK_COLUMNS)]


def _tokens_of(slots: Slots, start: int, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """Which loss tokens [N] lie in the chunk, and their row in it; the scratch row for those that don't."""
    place = slots.of - start
    inside = (place >= 0) & (place < chunk_rows)
    return inside, torch.where(inside, place, chunk_rows)
