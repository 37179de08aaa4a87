"""Scores to loss tokens in plain PyTorch, on anything: what the kernels are to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.segments import segment_ids


def scatter_rewards(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    """weight · rewards [B] of any dtype at the `last` token of each sample, in full at `all`, or spread (`mean`)."""
    segment = segment_ids(cu_loss, count)
    stop = cu_loss[1:][segment]
    values = rewards.double()[segment] * weight
    if at == "last":
        is_last = torch.arange(1, count + 1, device=cu_loss.device) == stop
        values = torch.where(is_last, values, 0.0)
    elif at == "mean":
        values = values / (stop - cu_loss[segment])
    return values.float()


def scatter_scores(
    values: Tensor,
    index: Tensor,
    factors: Tensor | None,
    offsets: Tensor,
    edges: Tensor,
    count: int,
    most: int,
) -> Tensor:
    """On tokens edges[p] to edges[p+1] the sum of values[index[t]] · factors[t] for t of piece p, in the order of t."""
    terms = values[index] if factors is None else values[index] * factors
    terms = torch.cat([terms, terms.new_zeros(1)])  # so that there is one to read
    start, length = offsets[:-1], offsets.diff()
    total = terms.new_zeros(len(start))
    for k in range(most):
        term = terms[torch.where(k < length, start + k, len(terms) - 1)]
        total = torch.where(k < length, total + term, total)
    return total[segment_ids(edges, count)].float()
