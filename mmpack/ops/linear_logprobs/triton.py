"""linear_selected_logprobs on Triton kernels: what they are handed, and in which order they run.

Statistics count in units of log 2 here; the torch path's are in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpack.ops.linear_logprobs.call import Call, Statistics, incoming
from mmpack.ops.linear_logprobs.shards import ordered_sum, stack_ranks, take_owned
from mmpack.ops.logprobs.row_groups import Slots, by_slot, slots_of


def stored_shapes(count: int, vocab: int, device: torch.device) -> tuple[list[int], list[int]]:
    """Shapes of what a forward stores for its backward: probabilities, and maxima of the tiles."""
    from mmpack.ops.linear_logprobs.forward_kernel import tiles_of

    columns = tiles_of(device).columns
    num_tiles = -(-vocab // columns)
    return [count, num_tiles * columns], [num_tiles, count]


def forward(call: Call, entropy: bool, store: bool) -> tuple[Statistics, Tensor, Tensor]:
    """Statistics; then the probabilities relative to their tile's maximum, and those maxima, or [0, 0] twice."""
    from mmpack.ops.linear_logprobs import forward_kernel as kernels

    hidden, weight, bias, _, runs, temperature, softcap, *_ = call
    columns, group = call.columns, call.group
    x = hidden
    if runs.rows is not None:
        unused = len(hidden) - 1  # T: nobody reads what comes out
        x = hidden.index_select(0, runs.rows if runs.order is None else runs.rows.clamp(max=unused))
    x, weight = kernels.aligned(x), kernels.aligned(weight)
    partials, stored = kernels.statistics(x, weight, bias, temperature, softcap, entropy, store)
    tile_maximum = partials.maximum
    slots = slots_of(runs, len(hidden), len(columns), hidden.device, 1)
    chosen = kernels.target_logits(x, weight, bias, slots.of, columns, softcap)
    chosen = take_owned(chosen, call.owner, group)
    gathered = kernels.Partials(*(stack_ranks(part, group) for part in partials))
    maximum, log_total, entropies = kernels.merge(gathered, entropy)
    if entropy:
        entropies = entropies[slots.of]
    maximum, log_total = maximum[slots.of], log_total[slots.of]
    scaled = chosen * (kernels.LOG2_E.value / temperature)
    logprobs = (scaled.double() - maximum.double() - log_total.double()) * math.log(2)
    if stored is None:
        stored, tile_maximum = x.new_empty(0, 0), tile_maximum.new_empty(0, 0)
    found = Statistics(logprobs.float(), entropies, maximum, log_total, chosen)
    return found, stored, tile_maximum


def backward(
    call: Call,
    statistics: Statistics,
    stored: Tensor,
    tile_maximum: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    needs: tuple[bool, bool, bool],
    budget: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As the torch path's."""
    from mmpack.ops.linear_logprobs import backward_kernels as kernels
    from mmpack.ops.linear_logprobs import forward_kernel as shapes
    from mmpack.ops.linear_logprobs import product_kernels as products

    hidden, weight, bias, _, _, temperature, softcap, *_ = call
    (num_rows, width), device, columns = hidden.shape, hidden.device, call.columns
    slots, gradients, entropy, at_targets = incoming(
        call, statistics, grad_logprobs, grad_entropies, 1
    )
    count, is_stored = len(slots.rows), stored.shape[1] > 0
    grad_hidden = hidden.new_zeros(num_rows, width) if needs[0] else None
    grad_bias = torch.zeros(len(weight), device=device) if needs[2] else None
    if count == 0:
        grad_weight = weight.new_zeros(weight.shape) if needs[1] else None
        return grad_hidden, grad_weight, None if bias is None else bias.new_zeros(bias.shape)

    at_targets = at_targets.float()
    along = gradients.logprob
    if entropy is not None:
        along = along + gradients.entropy * entropy.double()
    along = (-along / temperature).float()
    slope = None
    if entropy is not None:
        slope = (gradients.entropy * (-math.log(2) / temperature)).float()

    # Live rows first, in their order.
    order = torch.argsort(gradients.live.logical_not().to(torch.uint8), stable=True)
    live = gradients.live.sum(dtype=torch.int32)[None]
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(count, device=device))
    token_place = place[slots.of]
    slots = Slots(slots.rows[order], slots.writes[order], slots.of)
    log_total = by_slot(statistics.maximum + statistics.log_total, slots)[order]
    along, slope = along[order], None if slope is None else slope[order]
    del gradients, entropy, place  # a budget counts them too

    weight = shapes.aligned(weight)
    tiles = shapes.tiles_of(device)
    block_rows, chunk = kernels.plan(
        count, width, len(weight), (tiles.rows, tiles.columns), is_stored, budget
    )
    grad_weight = _like_rows(weight, len(weight), width, weight.dtype) if needs[1] else None
    # Of one block of rows after another.
    first_rows = min(block_rows, count)
    grad = hidden.new_empty(first_rows, chunk)
    x = _like_rows(hidden, first_rows, width, hidden.dtype)
    total = _like_rows(hidden, first_rows, width, torch.float32) if needs[0] else None
    for first in range(0, count, block_rows):
        block = slice(first, min(first + block_rows, count))
        here = block.stop - first
        grad, x = grad[:here], x[:here]
        products.live_block(hidden, slots.rows[block], live, first, x)
        if total is not None:
            total = total[:here].zero_()
        given = products.operands(grad, x, weight, total, grad_weight)
        rows = log_total[block], along[block], None if slope is None else slope[block]
        for column in range(0, len(weight), chunk):
            if is_stored:
                kernels.stored_logit_gradient(
                    grad, stored, tile_maximum, order[block], live, *rows, first, column,
                    temperature, softcap,
                )  # fmt: skip
            else:
                kernels.logit_gradient(
                    given, bias, live, *rows, first, column, temperature, softcap
                )
            kernels.set_targets(grad, token_place, columns, at_targets, first, column)
            if grad_bias is not None:
                kernels.add_column_sums(grad, live, grad_bias, first, column)
            if needs[0] or needs[1]:
                products.multiply(given, live, first, column)
        if grad_hidden is not None and total is not None:
            summed = ordered_sum(total, call.group)
            products.scatter_rows(grad_hidden, slots.writes[block], summed, live, first)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.contiguous(),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _like_rows(x: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Empty [rows, width] whose rows are 16-byte aligned."""
    return x.new_empty(rows, -(-width // 8) * 8, dtype=dtype)[:, :width]
