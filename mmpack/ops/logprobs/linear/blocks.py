"""The backward's work in blocks of rows and chunks of columns: slots that a gradient reaches first, sizes by memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.linear.call import Call, Statistics, gradients_of
from mmpack.ops.logprobs.row_groups import by_slot

# What a block takes by default, of the logits in two bytes; some of a twentieth is left for [N] values.
SHARE = 1 / 20.5
STORED_SHARE = 1 / 8  # where the probabilities are kept, D may take more
# Of a chunk: additions to the sums, launches and last waves come per chunk; another block costs a pass over the
# gradient to weight.
GOOD_COLUMNS = 8192
MIN_COLUMNS = 3072
MAX_BLOCKS = 4
MIN_ROWS = 2048  # of a block, unless there are fewer: its products must fill the device


def plan_blocks(
    count: int, width: int, vocab: int, tile: tuple[int, int], stored: bool, budget: int
) -> tuple[int, int]:
    """Rows of a block and columns of a chunk: one block in `budget` bytes, or blocks of SHARE each where it can't be.

    A block holds x in 2 bytes and a sum in 4 [rows, H], and D in 2 bytes [rows, columns]. Each block rounds the
    gradient to weight once. Without a budget columns follow from the model only: a row's gradient is the same bits
    in any batch.
    """
    least, blocks = min(MIN_COLUMNS, vocab), 1
    columns = vocab * STORED_SHARE if stored else (budget / count - 6 * width) / 2
    if columns < least:
        room = vocab * 2 * SHARE
        good = min(GOOD_COLUMNS, vocab)
        blocks = min(math.ceil((2 * good + 6 * width) / room), MAX_BLOCKS)
        columns = max((room * blocks - 6 * width) / 2, least)
        blocks = min(blocks, max(count // MIN_ROWS, 1))
    tile_rows, tile_columns = tile
    columns = max(int(min(columns, vocab + tile_columns)) // tile_columns, 1) * tile_columns
    return math.ceil(count / (blocks * tile_rows)) * tile_rows, columns


class Block(NamedTuple):
    """R slots from `first` on. D = p · (along + slope · log2 p)."""

    first: int
    slots: Tensor  # [R] int64, places among the stored probabilities
    reads: Tensor  # [R] int64, rows of hidden
    writes: Tensor  # [R] int64, rows of the gradient to hidden
    log_total: Tensor  # [R] float32, log2 of the sum of exp
    along: Tensor  # [R] float32
    slope: Tensor | None  # [R] float32, where a gradient to the entropy comes in
    live: Tensor  # [1] int32: how many of all S slots a gradient reaches; read on the device


class LiveFirst(NamedTuple):
    """All S slots as one block, those that a gradient reaches first; and the loss tokens."""

    whole: Block
    place: Tensor  # [N] int64, where each loss token's slot stands
    at_targets: Tensor  # [N] float32, the whole gradient to the target's logit

    def block(self, first: int, rows: int) -> Block:
        """The part of the rows from `first` on."""
        part = slice(first, first + rows)
        cut: list[Any] = [None if x is None else x[part] for x in self.whole[1:-1]]
        return Block._make([first, *cut, self.whole.live])


def live_first(call: Call, statistics: Statistics, given: Incoming) -> LiveFirst:
    """Gradients by slot, in units of log 2, live slots first and in their order."""
    found = gradients_of(call, statistics, given, 1)
    slots, along, slope = found.slots, found.logprob, None
    if found.entropies is not None:
        along = along + found.entropy * found.entropies.double()
        slope = (found.entropy * (-math.log(2) / call.temperature)).float()
    along = (-along / call.temperature).float()
    order = torch.argsort(found.live.logical_not().to(torch.uint8), stable=True)
    counted = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).index_copy_(0, order, counted)
    whole = Block(
        first=0,
        slots=order,
        reads=slots.rows[order],
        writes=slots.writes[order],
        log_total=by_slot(statistics.maximum + statistics.log_total, slots)[order],
        along=along[order],
        slope=None if slope is None else slope[order],
        live=found.live.sum(dtype=torch.int32)[None],
    )
    return LiveFirst(whole, place[slots.of], found.at_targets.float())
