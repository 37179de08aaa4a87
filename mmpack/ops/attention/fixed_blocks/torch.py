"""Fixed blocks in plain torch: each block of queries against all keys up to its end, as one product of a fixed shape.

A block's shape follows from its place on the path (or, where every query sees every key, from the sequence's length),
and rows that are not there are zeros. The gradient is torch's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmpack.ops.attention.rule import Lengths

BLOCK = 64  # queries, and the multiple that keys are padded to


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor]:
    """q [T, heads, d], k and v [K, kv heads, d] -> [T, heads, d], and log2 of each row's sum of exp, [heads, T]."""
    sizes_q, sizes_k = (x.diff().tolist() for x in lengths[:2])
    groups = q.shape[1] // k.shape[1]
    pieces = zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True)
    out = [(torch.zeros_like(q[:0]), q.new_empty(q.shape[1], 0, dtype=_wide(q)))]
    for query, *others in pieces:
        if len(query) == 0:
            continue
        key, value = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in others)
        rows, lse = _sequence(query.transpose(0, 1), key, value, scale, lengths.causal)
        out.append((rows.transpose(0, 1), lse))
    values, lses = zip(*out, strict=True)
    return torch.cat(values), torch.cat(lses, 1) / math.log(2)


def _sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [heads, Q, d], k and v [heads, K, d]; the last query stands at the last key. Values and log-sum-exp."""
    length, above = k.shape[1], k.shape[1] - q.shape[1]
    first = above // BLOCK * BLOCK
    ends = range(first + BLOCK, length + BLOCK, BLOCK)
    whole = -(-length // BLOCK) * BLOCK
    q = pad(q, (0, 0, above - first, whole - length))
    k, v = (pad(x, (0, 0, 0, whole - length)) for x in (k, v))
    out, lse = [], []
    for query, end in zip(q.split(BLOCK, 1), ends, strict=True):
        seen = end if causal else whole
        key = torch.arange(seen, device=q.device)
        row = torch.arange(end - BLOCK, end, device=q.device)
        hidden = key >= length
        hidden = hidden | (key > row[:, None]) if causal else hidden.expand(BLOCK, seen)
        scores = torch.bmm(query, k[:, :seen].transpose(1, 2)) * scale
        scores = scores.masked_fill(hidden & (key > 0), -torch.inf)
        out.append(torch.bmm(scores.softmax(-1), v[:, :seen]))
        lse.append(scores.detach().to(_wide(q)).logsumexp(-1))
    own = slice(above - first, length - first)
    return torch.cat(out, 1)[:, own], torch.cat(lse, 1)[:, own]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
