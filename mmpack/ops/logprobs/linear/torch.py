"""linear_selected_logprobs in plain torch: chunks of a fixed number of rows, each in blocks of the vocabulary.

A block of a row's logits leaves its maximum, sum of exp and sum of d · exp d. Blocks are merged in their order, those
of other ranks too. Products are summed in fp32 or better, whatever the inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming, Needs
from mmpack.ops.logprobs.gradients import row_gradient
from mmpack.ops.logprobs.linear.call import Call, Gradients, Head, Statistics, gradients_of
from mmpack.ops.logprobs.linear.shards import ordered_sum, stack_ranks, take_owned
from mmpack.ops.logprobs.row_groups import by_slot, slots_of
from mmpack.ops.logprobs.softmax import LOWEST, pad_columns

CHUNK_ROWS_CPU = 64
CHUNK_ROWS_GPU = 256
BLOCK_COLUMNS = 16384  # of the vocabulary: bounds what is upcast or summed at a time


def stored_shapes(count: int, vocab: int, device: torch.device) -> tuple[list[int], list[int]]:
    """As the Triton path's: nothing is stored here."""
    return [0, 0], [0, 0]


def forward(call: Call) -> Statistics:
    """Statistics in nats, over the ranks of a split vocabulary; nothing is stored."""
    hidden, columns, temperature = call.hidden, call.columns, call.temperature
    chunk_rows, product = _chunk_rows(hidden), product_dtype(call.head)
    slots = slots_of(call.groups, len(hidden), len(columns), hidden.device, chunk_rows)
    dtype = torch.promote_types(product, torch.float32)
    blocks = blocks_of(len(call.weight))
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
                z = block_logits(call.head, x, block, product)
                inside, place, column = _tokens_of(slots.of, start, chunk_rows, columns, block)
                chosen = torch.where(inside, z[place, column], chosen)
                z = z[:-1]
                maximum[i, chunk] = z.amax(-1).clamp_(min=LOWEST)
                shifted = z.sub_(maximum[i, chunk, None]).div_(temperature)
                p = shifted.clamp_(min=LOWEST).exp()
                total[i, chunk] = p.sum(-1)
                if call.entropy:
                    weighted[i, chunk] = p.mul_(shifted).sum(-1)
    chosen = take_owned(chosen, call.owner, call.group)
    highest, log_total, entropies = _merge(call, maximum, total, weighted)
    if call.entropy:
        entropies = entropies[slots.of]
    highest, log_total = highest[slots.of], log_total[slots.of]
    # Only [N] values: float64 costs nothing and leaves one rounding.
    logprobs = (chosen.double() - highest.double()) / temperature - log_total.double()
    nothing = hidden.new_empty(0, 0), hidden.new_empty(0, 0, dtype=torch.float32)
    return Statistics(logprobs.to(dtype), entropies, highest, log_total, chosen, *nothing)


def backward(given: Incoming, call: Call, statistics: Statistics, needs: Needs) -> Gradients:
    """Gradients that `needs` asks for."""
    hidden, weight, bias = call.hidden, call.weight, call.bias
    (num_rows, width), dtype = hidden.shape, statistics.logprobs.dtype
    chunk_rows, columns = _chunk_rows(hidden), call.columns
    found = gradients_of(call, statistics, given, chunk_rows)
    slots, at_targets = found.slots, found.at_targets.to(dtype)
    maximum, log_total = by_slot(statistics.maximum, slots), by_slot(statistics.log_total, slots)

    product, blocks = product_dtype(call.head), blocks_of(len(weight))
    to_hidden = hidden.new_zeros(num_rows + 1, width) if needs.to_hidden else None
    to_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs.to_weight else None
    to_bias = None
    if needs.to_bias and bias is not None:
        to_bias = bias.new_zeros(bias.shape, dtype=dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(slots.rows), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            x, live = hidden.index_select(0, slots.rows[chunk]), found.live[chunk, None]
            masked = x.masked_fill(~live, 0.0)
            total = torch.zeros(len(x), width, dtype=dtype, device=hidden.device)
            for block in blocks:
                z = block_logits(call.head, x, block, product)
                slope = None if call.softcap is None else 1 - (z[:-1] / call.softcap) ** 2
                grad = row_gradient(z[:-1], maximum, log_total, found, chunk, call.temperature)
                if slope is not None:
                    grad.copy_(torch.where(live, grad * slope, 0.0))
                _, place, column = _tokens_of(slots.of, start, chunk_rows, columns, block)
                z[place, column] = at_targets
                grad = grad[:, : block.stop - block.start]
                if to_hidden is not None:
                    total += product_of(grad, weight[block], product)
                if to_weight is not None:
                    to_weight[block] += product_of(grad.T, masked, product)
                if to_bias is not None:
                    to_bias[block] += grad.sum(0)
            if to_hidden is not None:
                to_hidden[slots.writes[chunk]] = ordered_sum(total, call.group).to(hidden.dtype)
    return Gradients(
        None if to_hidden is None else to_hidden[:num_rows],
        None if to_weight is None else to_weight.to(weight.dtype),
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
    )


def _merge(
    call: Call, maximum: Tensor, total: Tensor, weighted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of all ranks, [blocks, S] on each: maximum, log of the sum of exp above it, entropy or [0]; [S] each."""
    maximum, total = stack_ranks(maximum, call.group), stack_ranks(total, call.group)
    weighted = stack_ranks(weighted, call.group) if call.entropy else total
    highest = maximum.amax(0)
    all_total, all_weighted = torch.zeros_like(highest), torch.zeros_like(highest)
    for m, s, w in zip(maximum, total, weighted, strict=True):
        shift = (m - highest) / call.temperature
        all_total += s * shift.exp()
        all_weighted += (w + shift * s) * shift.exp()
    log_total = all_total.log()
    return highest, log_total, log_total - all_weighted / all_total if call.entropy else highest[:0]


def _chunk_rows(hidden: Tensor) -> int:
    return CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS_GPU


def block_logits(head: Head, x: Tensor, block: slice, product: torch.dtype) -> Tensor:
    """Logits of a chunk x [C, H] as [C + 1, columns padded]; padding holds -inf, the last row is scratch."""
    columns = block.stop - block.start
    shape = len(x) + 1, columns + pad_columns(columns)
    z = torch.empty(shape, dtype=torch.promote_types(product, torch.float32), device=x.device)
    z[:, columns:] = -torch.inf
    z[:-1, :columns] = product_of(x, head.weight[block].T, product)
    if head.bias is not None:
        z[:-1, :columns] += head.bias[block]
    if head.softcap is not None:
        z[:-1, :columns].div_(head.softcap).tanh_().mul_(head.softcap)
    return z


def product_dtype(head: Head) -> torch.dtype:
    """What factors are cast to: on a GPU bf16 stays bf16, all else is at least float32."""
    a, b = head.hidden.dtype, head.weight.dtype
    if head.hidden.device.type != "cpu" and a == b == torch.bfloat16:
        return torch.bfloat16
    return torch.promote_types(torch.promote_types(a, b), torch.float32)


def product_of(a: Tensor, b: Tensor, product: torch.dtype) -> Tensor:
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


def blocks_of(vocab: int) -> list[slice]:
    return [slice(i, min(i + BLOCK_COLUMNS, vocab)) for i in range(0, vocab, BLOCK_COLUMNS)]


def _tokens_of(
    slot_of: Tensor, start: int, chunk_rows: int, columns: Tensor, block: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Which loss tokens [N] lie in the chunk and block, their row and column in it; the scratch row for the others."""
    place, column = slot_of - start, columns - block.start
    inside = (place >= 0) & (place < chunk_rows)
    inside &= (column >= 0) & (column < block.stop - block.start)
    return inside, torch.where(inside, place, chunk_rows), torch.where(inside, column, 0)
