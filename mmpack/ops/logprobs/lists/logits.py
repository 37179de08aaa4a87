"""Logprobs over lists of ids from logits [T, V] that exist: an op for autograd.

An entry is one element of the logits, and of their gradient, which is 0 elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.backend import module_of
from mmpack.ops.logprobs.arguments import Tokens
from mmpack.ops.logprobs.autograd import Incoming, define, gradient_to_logits, sparse_rows
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.logprobs.lists.call import LogitsCall, Statistics, empty_statistics, lists_of
from mmpack.ops.logprobs.support import Support
from mmpack.ops.segments import keyed_sum


def from_logits(
    logits: Tensor, support: Support, tokens: Tokens, gradient: str
) -> tuple[Tensor, Tensor]:
    """Logprobs [N], and entropies [N], or [0] unless asked for, of checked arguments."""
    rows = tokens.row_of_each
    places, num_places = rows, logits.shape[0]
    if gradient == "compact" and tokens.rows_unique is not None:
        places, num_places = tokens.row_inverse, tokens.rows_unique.shape[0]
    call = LogitsCall(
        logits, *lists_of(support, tokens.targets), tokens.scale, rows, places, tokens.distinct,
        bool(tokens.entropy), gradient, num_places,
    )  # fmt: skip
    logprobs, entropies, *_ = _op(*call)
    return logprobs, entropies.to(logprobs.dtype)


def _forward(call: LogitsCall) -> Statistics:
    logits, ids = call.logits, call.ids.long()
    here = (ids >= 0) & (ids < logits.shape[1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = logits[call.entries_of(call.rows), torch.where(here, ids, 0)].to(dtype)
    found = torch.where(here, found, torch.nan)
    return module_of(SUPPORT_LOGPROBS, call.logits).statistics(call.lists, found, call.entropy)


def _fake(call: LogitsCall) -> Statistics:
    dtype = torch.promote_types(call.logits.dtype, torch.float32)
    return empty_statistics(call.logits, call, dtype)


def _backward(given: Incoming, call: LogitsCall, statistics: Statistics) -> Tensor:
    """Gradient to the logits: [T, V], in place of them, or compact [S, V]."""
    logits = call.logits
    shape = call.num_places, logits.shape[1]
    out = logits.zero_() if call.gradient == "inplace" else logits.new_zeros(shape)
    slopes = module_of(SUPPORT_LOGPROBS, call.logits).slopes(call.lists, given, statistics, None)
    vocab, places, ids = out.shape[1], call.entries_of(call.places), call.ids.long()
    ids = ids.clamp(0, max(vocab - 1, 0))  # one out of range made its token NaN
    if not call.distinct:
        slopes = keyed_sum(slopes, places * vocab + ids)
    # Entries of one place and id write the same bits.
    out.index_put_((places, ids), slopes.to(out.dtype))
    return out


def _fake_backward(given: Incoming, call: LogitsCall, statistics: Statistics) -> Tensor:
    return call.logits.new_empty(call.num_places, call.logits.shape[1])


def _sparse(values: Tensor, call: LogitsCall) -> Tensor:
    """Rows [S, V] of the gradient as a sparse COO tensor [T, V]."""
    index = torch.arange(call.num_places, device=values.device)
    if call.rows is not None and call.places is not None:
        # Entries of one place write the same row.
        index = index.index_copy_(0, call.places.long(), call.rows.long())
    return sparse_rows(index, values, call.logits)


_gradient = gradient_to_logits("support_logprobs_backward", _backward, _fake_backward, _sparse)
_op = define("support_logprobs", _forward, _fake, _gradient)
