"""Long lists: logits of a chunk of tokens by products with the whole head, of which the lists' entries are kept.

Chunks of tokens have a fixed number of rows, so that a token's bits don't depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.ops import invariance
from mmpack.ops.backend import choose
from mmpack.ops.logprobs.autograd import Needs
from mmpack.ops.logprobs.linear.shards import ordered_sum
from mmpack.ops.logprobs.linear.torch import block_logits, blocks_of, product_dtype, product_of
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.logprobs.lists.call import HiddenCall, Window
from mmpack.ops.rows.torch import sum_rows

ROWS_CPU = 64
ROWS_GPU = 2048
# Operations of a product in the time in which one byte is gathered.
# H200, measured (benchmarks/results/support.md): lists of 1,024 are gathered in 20.4 ms and lists of 2,048 in 40.5 ms,
# products take 24.6 ms. A list of V / 123 ids costs as much as all V: 1,236 of 152,064.
BFLOAT16 = 123.0
# float16 and float32 are multiplied in float32: 60 of the 67 TFLOP/s of the data sheet, gathers at 3.85 TB/s
# (benchmarks/results/gather_rows.md).
FLOAT32 = 16.0
# One core: from lists of V / 128 ids on, products take less time.
CPU = 64.0


def by_products(
    tokens: int, entries: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether multiplying the whole head is cheaper, for `entries` ids in the lists of `tokens` loss tokens.

    Within `mmpack.invariant` it is never asked for: bits would follow from the other lists of the batch.
    """
    if invariance.is_on():
        return False
    rate = CPU if device.type == "cpu" else BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    return entries * dtype.itemsize * rate > 2 * tokens * vocab


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Not in torch on a GPU: where the lists of some tokens begin and end is not known on the host."""
    return device.type == "cpu" or choose(SUPPORT_LOGPROBS, device, dtype) != "torch"


def entry_logits(path: Any, call: HiddenCall) -> Tensor:
    """Logits [M] of the entries, before the temperature; NaN for ids that this weight lacks."""
    hidden, product = call.hidden, product_dtype(call.head)
    out = torch.full(call.ids.shape, torch.nan, dtype=call.dtype, device=hidden.device)
    rows, size = _token_rows(call)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(rows), size):
            x = hidden.index_select(0, rows[start : start + size])
            for block in blocks_of(len(call.weight)):
                z = block_logits(call.head, x, block, product)
                path.take(z, out, _window(call, start, size, block))
    return out


def gradients(
    path: Any, call: HiddenCall, slopes: Tensor, live: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients to hidden and weight, of the entries' slopes [M]. The sum for weight is held in float32.

    `live` [N] bool: the tokens that a gradient reaches. Rows of the others may hold NaN.
    """
    hidden, weight, product = call.hidden, call.weight, product_dtype(call.head)
    rows, size = _token_rows(call)
    width, count = hidden.shape[1], len(call.targets)
    # By token. Where rows repeat they are summed below, and rounded once.
    to_tokens = hidden.new_empty(
        len(rows), width, dtype=hidden.dtype if call.distinct else call.dtype
    )
    to_weight = weight.new_zeros(weight.shape, dtype=call.dtype) if needs.to_weight else None
    live = torch.nn.functional.pad(live, (0, len(rows) - count))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(rows), size):
            chunk = slice(start, start + size)
            x = hidden.index_select(0, rows[chunk]).masked_fill_(~live[chunk, None], 0.0)
            total = torch.zeros(size, width, dtype=call.dtype, device=hidden.device)
            for block in blocks_of(len(weight)):
                window = _window(call, start, size, block)
                grad = torch.zeros(size, window.columns, dtype=product, device=hidden.device)
                path.put(grad, slopes, window)
                if needs.to_hidden:
                    total += product_of(grad, weight[block], product)
                if to_weight is not None:
                    to_weight[block] += product_of(grad.T, x, product)
            to_tokens[chunk] = ordered_sum(total, call.group).to(to_tokens.dtype)
    to_weight = None if to_weight is None else to_weight.to(weight.dtype)
    if not needs.to_hidden:
        return None, to_weight
    to_tokens, rows = to_tokens[:count], rows[:count]
    if call.distinct:
        return hidden.new_zeros(hidden.shape).index_copy_(0, rows, to_tokens), to_weight
    return sum_rows(to_tokens, rows, None, len(hidden)).to(hidden.dtype), to_weight


def _window(call: HiddenCall, start: int, size: int, block: slice) -> Window:
    """Tokens from `start` on, and a block of this weight's columns."""
    first = call.first_column + block.start
    return Window(call.lists, start, size, first, block.stop - block.start)


def _token_rows(call: HiddenCall) -> tuple[Tensor, int]:
    """The row of hidden of each token, filled up with row 0 to whole chunks; and the rows of a chunk."""
    count, device = len(call.targets), call.hidden.device
    size = ROWS_CPU if device.type == "cpu" else ROWS_GPU
    rows = torch.arange(count, device=device) if call.rows is None else call.rows.long()
    return torch.nn.functional.pad(rows, (0, -count % size)), size
