"""linear_selected_logprobs in plain torch: chunks of a fixed number of rows, each in blocks of the vocabulary.

A block of a row's logits leaves its maximum, sum of exp and sum of d · exp d; blocks are merged in their order, over
the ranks of a split vocabulary too. Products are summed in fp32 whatever the inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.linear_logprobs.call import Call, Statistics, incoming
from mmpack.ops.linear_logprobs.shards import ordered_sum, stack_ranks, take_owned
from mmpack.ops.logprobs.row_groups import by_slot, slots_of
from mmpack.ops.logprobs.softmax import LOWEST, pad_columns, row_gradient

CHUNK_ROWS_CPU = 64
CHUNK_ROWS_GPU = 256
BLOCK_COLUMNS = 16384  # of the vocabulary: bounds what is upcast or summed at a time


def forward(call: Call, entropy: bool) -> Statistics:
    """Statistics in nats, over the ranks of a split vocabulary."""
    hidden, weight, bias, _, runs, temperature, softcap, *_ = call
    columns, group = call.columns, call.group
    chunk_rows, product = _chunk_rows(hidden), _product_dtype(hidden, weight)
    slots = slots_of(runs, len(hidden), len(columns), hidden.device, chunk_rows)
    dtype = torch.promote_types(product, torch.float32)
    blocks = _blocks(len(weight))
    maximum, total, weighted = (
        torch.empty(len(blocks), len(slots.rows), dtype=dtype, device=hidden.device)
        for _ in range(3)
    )
    chosen = torch.full_like(columns, -torch.inf, dtype=dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(slots.rows), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            x = hidden.index_select(0, slots.rows[chunk])
            for i, block in enumerate(blocks):
                z = _logits(x, weight, bias, block, product, softcap)
                inside, place, column = _tokens_of(slots.of, start, chunk_rows, columns, block)
                chosen = torch.where(inside, z[place, column], chosen)
                z = z[:-1]
                maximum[i, chunk] = z.amax(-1).clamp_(min=LOWEST)
                shifted = z.sub_(maximum[i, chunk, None]).div_(temperature)
                p = shifted.clamp_(min=LOWEST).exp()
                total[i, chunk] = p.sum(-1)
                if entropy:
                    weighted[i, chunk] = p.mul_(shifted).sum(-1)
    chosen = take_owned(chosen, call.owner, group)
    maximum, total = stack_ranks(maximum, group), stack_ranks(total, group)
    weighted = stack_ranks(weighted, group) if entropy else total
    highest = maximum.amax(0)
    all_total, all_weighted = torch.zeros_like(highest), torch.zeros_like(highest)
    for m, s, w in zip(maximum, total, weighted, strict=True):
        shift = (m - highest) / temperature
        all_total += s * shift.exp()
        all_weighted += (w + shift * s) * shift.exp()
    log_total = all_total.log()
    entropies = (log_total - all_weighted / all_total)[slots.of] if entropy else highest[:0]
    highest, log_total = highest[slots.of], log_total[slots.of]
    # [N] values alone: float64 costs nothing and leaves one rounding.
    logprobs = (chosen.double() - highest.double()) / temperature - log_total.double()
    return Statistics(logprobs.to(dtype), entropies, highest, log_total, chosen)


def backward(
    call: Call,
    statistics: Statistics,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients to hidden (summed over the ranks), weight and bias, those that `needs` asks for."""
    hidden, weight, bias, _, _, temperature, softcap, *_ = call
    (num_rows, width), dtype = hidden.shape, statistics.logprobs.dtype
    chunk_rows, columns = _chunk_rows(hidden), call.columns
    slots, gradients, entropy, at_targets = incoming(
        call, statistics, grad_logprobs, grad_entropies, chunk_rows
    )
    maximum, log_total = by_slot(statistics.maximum, slots), by_slot(statistics.log_total, slots)
    at_targets = at_targets.to(dtype)

    product, blocks = _product_dtype(hidden, weight), _blocks(len(weight))
    grad_hidden = hidden.new_zeros(num_rows + 1, width) if needs[0] else None
    grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs[1] else None
    grad_bias = bias.new_zeros(bias.shape, dtype=dtype) if needs[2] and bias is not None else None
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(slots.rows), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            x = hidden.index_select(0, slots.rows[chunk])
            masked = x.masked_fill(~gradients.live[chunk, None], 0.0)
            h = None if entropy is None else entropy[chunk]
            total = torch.zeros(len(x), width, dtype=dtype, device=hidden.device)
            for block in blocks:
                z = _logits(x, weight, bias, block, product, softcap)
                slope = None if softcap is None else 1 - (z[:-1] / softcap) ** 2
                grad_z = row_gradient(
                    z[:-1], maximum[chunk], log_total[chunk], h, gradients, chunk, temperature
                )
                if slope is not None:
                    grad_z.copy_(torch.where(gradients.live[chunk, None], grad_z * slope, 0.0))
                _, place, column = _tokens_of(slots.of, start, chunk_rows, columns, block)
                z[place, column] = at_targets
                grad_z = grad_z[:, : block.stop - block.start]
                if grad_hidden is not None:
                    total += _product(grad_z, weight[block], product)
                if grad_weight is not None:
                    grad_weight[block] += _product(grad_z.T, masked, product)
                if grad_bias is not None:
                    grad_bias[block] += grad_z.sum(0)
            if grad_hidden is not None:
                grad_hidden[slots.writes[chunk]] = ordered_sum(total, call.group).to(hidden.dtype)
    return (
        None if grad_hidden is None else grad_hidden[:num_rows],
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _chunk_rows(hidden: Tensor) -> int:
    return CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS_GPU


def _logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    block: slice,
    product: torch.dtype,
    softcap: float | None,
) -> Tensor:
    """Logits of a chunk x [C, H] as [C + 1, columns padded]; padding holds -inf, the last row is scratch."""
    columns = block.stop - block.start
    shape = len(x) + 1, columns + pad_columns(columns)
    z = torch.empty(shape, dtype=torch.promote_types(product, torch.float32), device=x.device)
    z[:, columns:] = -torch.inf
    z[:-1, :columns] = _product(x, weight[block].T, product)
    if bias is not None:
        z[:-1, :columns] += bias[block]
    if softcap is not None:
        z[:-1, :columns].div_(softcap).tanh_().mul_(softcap)
    return z


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


def _tokens_of(
    slot_of: Tensor, start: int, chunk_rows: int, columns: Tensor, block: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Which loss tokens [N] lie in the chunk and block, their row and column in it; the scratch row for the others."""
    place, column = slot_of - start, columns - block.start
    inside = (place >= 0) & (place < chunk_rows)
    inside &= (column >= 0) & (column < block.stop - block.start)
    return inside, torch.where(inside, place, chunk_rows), torch.where(inside, column, 0)
