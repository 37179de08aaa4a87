"""Mean and spread of the other samples of each group, in plain PyTorch on any device, float64 inside."""

from __future__ import annotations

import torch
from torch import Tensor

Moments = tuple[
    Tensor, Tensor, Tensor
]  # count, mean, and the sum of squared distances from the mean


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
