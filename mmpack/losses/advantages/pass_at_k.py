"""Advantages for the best of k answers, exactly, over all groups of k: plain PyTorch on any device, float64 inside.

Of n rewards in ascending order the j-th (from 1) is the best of C(j-1, k-1) of the C(n, k) groups of k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpack.ops.segments import keyed_sum, suffix_scan

ROUNDING = 1e-10  # of the largest reward: a smaller std is what rounding leaves of 0


def pass_at_k(rewards: Tensor, group_index: Tensor, k: int, eps: float) -> Tensor:
    """(mean of the best over groups of k with the sample - mean over all) / (std over all + eps), [B] float32.

    With rewards of 0 and 1 this is the analytic advantage of pass@k training (arXiv 2508.10751). 0 where a group has
    no more than k samples.
    """
    k = min(k, len(rewards) + 1)  # no group has more
    r, order = torch.sort(rewards.double(), stable=True)
    keys, by_group = torch.sort(group_index[order], stable=True)
    r, order = r[by_group], order[by_group]
    start, stop = torch.searchsorted(keys, keys), torch.searchsorted(keys, keys, right=True)
    size = (stop - start).double()
    rank = (torch.arange(len(r), device=r.device) - start + 1).double()

    r = r - r[start] if len(r) else r  # from the least of the group: equal rewards are 0
    best = _chosen(rank - 1, k - 1, size, k)
    mean = keyed_sum(best * r, keys)
    variance = keyed_sum(best * (r - mean).square(), keys)
    centred = r - mean
    with_it = _chosen(rank - 1, k - 1, size - 1, k - 1) * centred
    beaten = _chosen(rank - 2, k - 2, size - 1, k - 1) * centred
    behind = suffix_scan(beaten, stop) - beaten
    std = variance.sqrt()
    none = (size <= k) | (std <= ROUNDING * r[stop - 1]) if len(r) else std == 0
    advantages = torch.where(none, 0.0, (with_it + behind) / (std + eps))
    return torch.empty_like(advantages).index_copy_(0, order, advantages).float()


def _chosen(n: Tensor, k: int, of: Tensor, most: int) -> Tensor:
    """C(n, k) / C(of, most), 0 where there is none."""
    there = (n >= k) & (of >= most) & (k >= 0)
    n, of = torch.where(there, n, max(k, 0)), torch.where(there, of, most)
    logs = _log_choices(n, max(k, 0)) - _log_choices(of, most)
    return torch.where(there, logs.exp(), 0.0)


def _log_choices(n: Tensor, k: int) -> Tensor:
    return torch.lgamma(n + 1) - math.lgamma(k + 1) - torch.lgamma(n - k + 1)
