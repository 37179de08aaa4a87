"""Statistics of groups in plain PyTorch and float64, on anything: what the kernels of group_advantages are to compute,
and the kinds that have none. Of n rewards in ascending order the j-th (from 1) is the best of C(j-1, k-1) of the
C(n, k) groups of k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpack.ops.segments import keyed_sum, suffix_scan

# count, mean, and the sum of squared distances from the mean
Moments = tuple[Tensor, Tensor, Tensor]
ROUNDING = 1e-10  # of the largest reward: a smaller std is what rounding leaves of 0


def group_advantages(
    rewards: Tensor, group_index: Tensor, num_tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    r = rewards.double()
    if kind == "grpo":
        return standardised(r, group_index, eps).float()
    size = keyed_sum(torch.ones_like(r), group_index)
    mean = keyed_sum(r, group_index) / size
    centred = r - mean

    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":
        return (centred * size / (size - 1).clamp(min=1.0)).float()
    if kind == "lite_ppo":
        return scaled(centred, spread(r, torch.ones_like(r))[1], eps).float()
    baselined = torch.where(size > 1, centred, r)
    weights = torch.ones_like(r) if num_tokens is None else num_tokens.double()
    return scaled(*spread(baselined, weights), eps).float()


def spread(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Distances [B] of values from their mean, and their variance; value b counts weights[b] times."""
    total = weights.sum()
    centred = values - (weights * values).sum() / total.clamp(min=1.0)
    return centred, (weights * centred.square()).sum() / (total - 1).clamp(min=1.0)


def scaled(centred: Tensor, variance: Tensor, eps: float) -> Tensor:
    std = variance.sqrt()
    return torch.where(std == 0, 0.0, centred / (std + eps))


def standardised(rewards: Tensor, group_index: Tensor, eps: float) -> Tensor:
    """(r - mean) / (std + eps) within groups, [B] float64: `grpo` before it is rounded."""
    size = keyed_sum(torch.ones_like(rewards), group_index)
    centred = rewards - keyed_sum(rewards, group_index) / size
    variance = keyed_sum(centred.square(), group_index) / (size - 1).clamp(min=1.0)
    return scaled(centred, variance, eps)


def leave_one_out(rewards: Tensor, group_index: Tensor, eps: float) -> Tensor:
    """(r - mean of the others) / (std of the others + eps), [B] float32; r - mean of the others where their std is 0.

    The others' moments are those before a sample in its group and those behind it, merged: no large sums are
    subtracted from each other, so others that are equal have a spread of exactly 0.
    """
    r = rewards.double()
    keys, order = torch.sort(group_index, stable=True)
    start, stop = torch.searchsorted(keys, keys), torch.searchsorted(keys, keys, right=True)
    r = r[order]
    behind = _behind(r, stop)
    before = tuple(x.flip(0) for x in _behind(r.flip(0), (len(r) - start).flip(0)))
    count, mean, squares = _merged(before, behind)  # type: ignore[arg-type]
    distance = torch.where(count > 0, r - mean, 0.0)
    std = (squares / (count - 1).clamp(min=1.0)).sqrt()
    scaled = torch.where(std == 0, distance, distance / (std + eps))
    return torch.empty_like(scaled).index_copy_(0, order, scaled).float()


def _behind(values: Tensor, stop: Tensor) -> Moments:
    """Moments of values [i + 1, stop[i]) for each i, by doubling as in `suffix_scan`."""
    count = len(values)
    index = torch.arange(count, device=values.device)
    moments: Moments = (torch.ones_like(values), values, torch.zeros_like(values))
    reach = 1
    while reach < count:
        inside = index[reach:] < stop[:-reach]
        near = tuple(x[:-reach] for x in moments)
        joined = _merged(near, tuple(x[reach:] for x in moments))  # type: ignore[arg-type]
        moments = tuple(  # type: ignore[assignment]
            torch.cat([torch.where(inside, new, old), x[-reach:]])
            for new, old, x in zip(joined, near, moments, strict=True)
        )
        reach *= 2
    inside = index + 1 < stop
    return tuple(torch.where(inside, x.roll(-1), 0.0) for x in moments)  # type: ignore[return-value]


def _merged(a: Moments, b: Moments) -> Moments:
    """Moments of two sets together (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    apart, share = b[1] - a[1], b[0] / count.clamp(min=1.0)
    # a set of none has no mean
    mean = torch.where(a[0] == 0, b[1], torch.where(b[0] == 0, a[1], a[1] + apart * share))
    between = torch.where((a[0] == 0) | (b[0] == 0), 0.0, apart.square() * a[0] * share)
    return count, mean, a[2] + b[2] + between


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
