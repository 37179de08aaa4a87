"""Logprobs over lists of ids from hidden states [T, H] and the output weight [V, H]: an op for autograd.

The entries of all lists are a sparse matrix D [T, V]. Its values are products of a row of hidden and one of weight; the
gradient to hidden is D · weight, and that to weight Dᵀ · hidden, both summed over sorted runs of entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.ops.backend import module_of
from mmpack.ops.logprobs.arguments import Tokens
from mmpack.ops.logprobs.autograd import Incoming, Needs, define, gradients_to_head
from mmpack.ops.logprobs.linear.call import Gradients, Head
from mmpack.ops.logprobs.linear.shards import ordered_sum, take_owned
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS, products
from mmpack.ops.logprobs.lists.call import (
    HiddenCall,
    Runs,
    Statistics,
    empty_statistics,
    lists_of,
    runs_by,
)
from mmpack.ops.logprobs.lists.products import by_products, can_multiply
from mmpack.ops.logprobs.support import Support
from mmpack.ops.segments import segment_sum


def from_hidden(head: Head, support: Support, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Logprobs [N], and entropies [N], or [0] unless asked for, of checked arguments."""
    hidden, weight, bias, softcap = head[:4]
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # by the whole vocabulary, so that values are the same bits for any number of ranks
    count, entries = tokens.targets.shape[0], support.ids.shape[0]
    multiply = by_products(count, entries, head.vocab, hidden.device, dtype)
    call = HiddenCall(
        hidden, weight, bias, *lists_of(support, tokens.targets), tokens.scale, tokens.row_of_each,
        tokens.distinct, multiply, softcap, bool(tokens.entropy), *head.shard,
    )  # fmt: skip
    logprobs, entropies, *_ = _op(*call)
    return logprobs, entropies.to(logprobs.dtype)


def _forward(call: HiddenCall) -> Statistics:
    path = module_of(SUPPORT_LOGPROBS, call.hidden, call.weight)
    found = products.entry_logits(path, call) if _multiplies(call) else path.dots(call)
    if call.group:
        found = take_owned(found, call.owner, call.group)
    return path.statistics(call.lists, found, call.entropy)


def _fake(call: HiddenCall) -> Statistics:
    return empty_statistics(call.hidden, call, call.dtype)


def _backward(given: Incoming, call: HiddenCall, statistics: Statistics, needs: Needs) -> Gradients:
    path = module_of(SUPPORT_LOGPROBS, call.hidden, call.weight)
    slopes = path.slopes(call.lists, given, statistics, call.softcap)
    columns = call.columns
    by_id, multiplies = None, _multiplies(call)
    if needs.to_bias or (needs.to_weight and not multiplies):
        by_id = runs_by(columns, len(call.weight))
    if multiplies:
        live = given.grad_logprobs != 0
        if given.grad_entropies is not None:
            live |= given.grad_entropies != 0
        hidden, weight = products.gradients(path, call, slopes, live, needs)
    else:
        entry_rows = call.entry_rows
        hidden = _to_hidden(path, call, slopes, columns, entry_rows) if needs.to_hidden else None
        weight = None
        if needs.to_weight and by_id is not None:
            weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
            path.sum_runs(weight, None, call.hidden, entry_rows, slopes, by_id)
    bias = None
    if needs.to_bias and by_id is not None and call.bias is not None:
        # One run more, of the entries of other ranks.
        offsets = torch.nn.functional.pad(by_id.offsets, (0, 1), value=len(slopes))
        bias = segment_sum(slopes[by_id.order], offsets)[:-1].to(call.bias.dtype)
    return Gradients(hidden, weight, bias)


def _to_hidden(
    path: Any, call: HiddenCall, slopes: Tensor, columns: Tensor, entry_rows: Tensor
) -> Tensor:
    """D · weight [T, H], summed over the ranks in their order."""
    hidden, places = call.hidden, None
    if call.distinct:
        # Offsets beyond M made all values NaN; they are not followed.
        offsets = call.starts.clamp(0, len(call.ids))
        runs, places = Runs(call.lists.tokens, None, offsets), call.rows
    else:
        runs = runs_by(entry_rows, len(hidden))
    here = columns < len(call.weight)
    columns, slopes = torch.where(here, columns, 0), torch.where(here, slopes, 0.0)
    # Of a split vocabulary it is rounded once, after the sum over the ranks.
    out = hidden.new_zeros(hidden.shape, dtype=call.dtype if call.group else hidden.dtype)
    path.sum_runs(out, places, call.weight, columns, slopes, runs)
    return ordered_sum(out, call.group).to(hidden.dtype)


def _multiplies(call: HiddenCall) -> bool:
    return call.products and can_multiply(call.hidden.device, _factors(call))


def _factors(call: HiddenCall) -> torch.dtype:
    return torch.promote_types(call.hidden.dtype, call.weight.dtype)


_gradients = gradients_to_head("support_linear_logprobs_backward", _backward)
_op = define("support_linear_logprobs", _forward, _fake, _gradients)
