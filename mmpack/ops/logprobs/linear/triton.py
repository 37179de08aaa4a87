"""linear_selected_logprobs on Triton kernels: what they get, and in which order they run.

Statistics count in units of log 2 here; the torch path's are in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming, Needs
from mmpack.ops.logprobs.linear import backward_kernels as backwards
from mmpack.ops.logprobs.linear import forward_kernel as forwards
from mmpack.ops.logprobs.linear import product_kernels as products
from mmpack.ops.logprobs.linear.blocks import Block, LiveFirst, live_first, plan_blocks
from mmpack.ops.logprobs.linear.call import Call, Gradients, Statistics
from mmpack.ops.logprobs.linear.shards import ordered_sum, stack_ranks, take_owned
from mmpack.ops.logprobs.linear.tiles import LOG2_E, aligned, tiles_of
from mmpack.ops.logprobs.row_groups import slots_of


def stored_shapes(count: int, vocab: int, device: torch.device) -> tuple[list[int], list[int]]:
    """Shapes of what a forward stores for its backward: probabilities, and maxima of the tiles."""
    columns = tiles_of(device).columns
    num_tiles = -(-vocab // columns)
    return [count, num_tiles * columns], [num_tiles, count]


def forward(call: Call) -> Statistics:
    """Statistics in units of log 2, over the ranks of a split vocabulary."""
    with torch.cuda.device_of(call.hidden):
        return _forward(call)


def backward(given: Incoming, call: Call, statistics: Statistics, needs: Needs) -> Gradients:
    """Gradients that `needs` asks for."""
    with torch.cuda.device_of(call.hidden):
        return _backward(live_first(call, statistics, given), call, statistics, needs)


def _forward(call: Call) -> Statistics:
    hidden, columns, temperature = call.hidden, call.columns, call.temperature
    x = hidden
    if call.rows is not None:
        # An empty group has row T; no loss token reads what comes out.
        rows = call.rows if call.order is None else call.rows.clamp(max=len(hidden) - 1)
        x = hidden.index_select(0, rows)
    x, weight = aligned(x), aligned(call.weight)
    partials, stored = forwards.statistics(
        x, weight, call.bias, temperature, call.softcap, call.entropy, call.store
    )
    slots = slots_of(call.groups, len(hidden), len(columns), hidden.device, 1)
    chosen = forwards.target_logits(x, weight, call.bias, slots.of, columns, call.softcap)
    chosen = take_owned(chosen, call.owner, call.group)
    gathered = forwards.Partials(*(stack_ranks(part, call.group) for part in partials))
    maximum, log_total, entropies = forwards.merge(gathered, call.entropy)
    if call.entropy:
        entropies = entropies[slots.of]
    maximum, log_total = maximum[slots.of], log_total[slots.of]
    scaled = chosen * (LOG2_E.value / temperature)
    logprobs = (scaled.double() - maximum.double() - log_total.double()) * math.log(2)
    tile_maximum = partials.maximum
    if stored is None:
        stored, tile_maximum = x.new_empty(0, 0), tile_maximum.new_empty(0, 0)
    return Statistics(logprobs.float(), entropies, maximum, log_total, chosen, stored, tile_maximum)


def _backward(rows: LiveFirst, call: Call, statistics: Statistics, needs: Needs) -> Gradients:
    hidden, count = call.hidden, len(rows.whole.slots)
    vocab, width = call.weight.shape
    to_hidden = hidden.new_zeros(hidden.shape) if needs.to_hidden else None
    to_bias = torch.zeros(vocab, device=hidden.device) if needs.to_bias else None
    if count == 0:
        to_weight = call.weight.new_zeros(call.weight.shape) if needs.to_weight else None
        return _in_order(call, to_hidden, to_weight, to_bias)

    weight = aligned(call.weight)
    to_weight = _aligned_rows(weight, vocab, width, weight.dtype) if needs.to_weight else None
    tiles, is_stored = tiles_of(hidden.device), statistics.stored.shape[1] > 0
    block_rows, chunk = plan_blocks(
        count, width, vocab, (tiles.rows, tiles.columns), is_stored, call.budget
    )
    # Of one block after another.
    most = min(block_rows, count)
    grad = hidden.new_empty(most, chunk)
    x = _aligned_rows(hidden, most, width, hidden.dtype)
    total = _aligned_rows(hidden, most, width, torch.float32) if needs.to_hidden else None
    for first in range(0, count, block_rows):
        block = rows.block(first, block_rows)
        here = len(block.slots)
        grad, x = grad[:here], x[:here]
        products.gather_live(hidden, block, x)
        if total is not None:
            total = total[:here].zero_()
        operands = products.make_operands(grad, x, weight, total, to_weight)
        _add_block(call, statistics, rows, block, operands, grad, to_bias)
        if to_hidden is not None and total is not None:
            products.scatter_live(to_hidden, block, ordered_sum(total, call.group))
    return _in_order(call, to_hidden, to_weight, to_bias)


def _add_block(
    call: Call,
    statistics: Statistics,
    rows: LiveFirst,
    block: Block,
    operands: products.Operands,
    grad: Tensor,
    to_bias: Tensor | None,
) -> None:
    """What a block adds to all gradients: D chunk after chunk of the columns, and its products."""
    columns = call.columns
    for column in range(0, len(call.weight), grad.shape[1]):
        if statistics.stored.shape[1]:
            backwards.stored_logit_gradient(call, statistics, grad, block, column)
        else:
            backwards.logit_gradient(call, operands, block, column)
        backwards.set_targets(grad, rows, columns, block.first, column)
        if to_bias is not None:
            backwards.add_column_sums(grad, block, to_bias, column)
        if operands.total is not None or operands.grad_weight is not None:
            products.multiply(operands, block, column)


def _in_order(
    call: Call, to_hidden: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
) -> Gradients:
    """Strides and dtypes of the op's fake; a weight's gradient has padded rows where the kernels need them."""
    return Gradients(
        to_hidden,
        None if to_weight is None else to_weight.contiguous(),
        None if to_bias is None or call.bias is None else to_bias.to(call.bias.dtype),
    )


def _aligned_rows(x: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Empty [rows, width] whose rows are 16-byte aligned."""
    return x.new_empty(rows, -(-width // 8) * 8, dtype=dtype)[:, :width]
