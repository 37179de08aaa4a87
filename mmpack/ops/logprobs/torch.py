"""selected_logprobs in plain torch: rows in chunks of a fixed count, so a row's bits don't depend on the others."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import Call, Statistics
from mmpack.ops.logprobs.gradients import row_gradient, slot_gradients
from mmpack.ops.logprobs.row_groups import by_slot, slots_of
from mmpack.ops.logprobs.softmax import pad_columns, row_statistics

CHUNK_ROWS = 64


def forward(call: Call) -> Statistics:
    logits, targets, temperature = call.logits, call.targets.long(), call.temperature
    slots = slots_of(call.groups, len(logits), len(targets), logits.device, CHUNK_ROWS)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    maximum, log_total, entropies = (
        torch.empty(len(slots.rows), dtype=dtype, device=logits.device) for _ in range(3)
    )
    for start in range(0, len(slots.rows), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        x = _read(logits, slots.rows[chunk], dtype)
        maximum[chunk], log_total[chunk], h = row_statistics(x, temperature, call.entropy)
        if h is not None:
            entropies[chunk] = h
    maximum, log_total = maximum[slots.of], log_total[slots.of]
    entropies = entropies[slots.of] if call.entropy else entropies[:0]
    # Only [N] values: float64 costs nothing and leaves one rounding.
    chosen = logits[slots.rows[slots.of], targets].double() - maximum.double()
    logprobs = (chosen / temperature - log_total.double()).to(dtype)
    return Statistics(logprobs, entropies, maximum, log_total)


def backward(given: Incoming, call: Call, statistics: Statistics) -> Tensor:
    """Gradient to the logits: dense [T, V], in place of the logits, or compact [S, V] by group."""
    logits = call.logits
    (num_rows, vocab), compact = logits.shape, call.gradient == "compact"
    if call.gradient == "inplace":
        out = logits
        if call.rows is not None:
            unread = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
            logits.masked_fill_(unread.index_fill_(0, call.rows.long(), False)[:, None], 0.0)
    elif compact:
        out = logits.new_zeros(num_rows if call.rows is None else len(call.rows), vocab)
    else:
        # Empty groups write row T.
        out = logits.new_zeros(num_rows + 1, vocab)
    _write(out, compact, given, call, statistics)
    return out if compact else out[:num_rows]


def _write(out: Tensor, compact: bool, given: Incoming, call: Call, statistics: Statistics) -> None:
    """Write the rows that are read: row r to out[r], or compact slot s to out[s]."""
    logits, temperature = call.logits, call.temperature
    found = slot_gradients(call, given, statistics.logprobs, statistics.entropies, CHUNK_ROWS)
    slots = found.slots
    maximum, log_total = by_slot(statistics.maximum, slots), by_slot(statistics.log_total, slots)
    count = len(logits) if call.rows is None else len(call.rows)
    places = torch.arange(len(slots.rows), device=logits.device) if compact else slots.writes
    for start in range(0, count, CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        x = _read(logits, slots.rows[chunk], maximum.dtype)
        x = row_gradient(x, maximum, log_total, found, chunk, temperature)
        here = places[start : min(start + CHUNK_ROWS, count)]
        out[here] = x[: len(here), : out.shape[1]].to(out.dtype)
    out[places[slots.of], call.targets.long()] = found.at_targets.to(out.dtype)


def _read(logits: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a fresh [C, V padded] tensor; padding columns hold -inf."""
    x = logits.index_select(0, rows).to(dtype)
    padding = pad_columns(x.shape[1])
    return torch.nn.functional.pad(x, (0, padding), value=-torch.inf) if padding else x
