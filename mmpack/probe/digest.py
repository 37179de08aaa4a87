"""Digests of rows: values [R, H] -> float32 [R, k + 2], small enough to keep for every module and token.

A digest is `k` seeded Gaussian projections of a row, its L2 norm and its largest absolute value. Of two rows x and y,
|P(x − y)| / √k estimates |x − y| without bias in its square (Johnson and Lindenstrauss, 1984). All sums are float64.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

DIRECTIONS = 8
FLOOR = 4 * 2.0**-24  # relative: digests are kept in float32
_CHUNK = 1 << 24  # elements that are float64 at once


def digest(values: torch.Tensor, directions: int = DIRECTIONS, seed: int = 0) -> np.ndarray:
    """float32 [R, k + 2]: projections, norm, largest absolute value of each row of `values` [R, H].

    What it can miss: a difference that is all but orthogonal to all k directions. By chance 1 row in 10^6 has a
    difference that is estimated at less than a tenth (k = 8), and 2 in 100 at less than 0.45 or more than 1.6 of what
    it is. Differences below 2^-24 of the row's norm are lost in the digest's own rounding. A row with NaN or infinity
    has norm inf and projections 0: it equals no finite row.
    """
    rows, width = values.shape
    out = np.empty((rows, directions + 2), dtype=np.float32)
    across = _directions(width, directions, seed)
    if values.device.type != "cpu":
        across = across.to(values.device)
    step = max(1, _CHUNK // max(width, 1))
    for start in range(0, rows, step):
        wide = values[start : start + step].detach().to(torch.float64)
        made = torch.cat(
            [
                wide @ across,
                torch.linalg.vector_norm(wide, dim=1, keepdim=True),
                wide.abs().amax(1, keepdim=True) if width else wide.new_zeros(len(wide), 1),
            ],
            dim=1,
        )
        out[start : start + step] = made.to(torch.float32).cpu().numpy()
    broken = ~np.isfinite(out).all(1)
    out[broken] = 0
    out[broken, -2:] = np.inf
    return out


def distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """float64 [R]: the estimated |x − y| / max(|x|, |y|) of digests [R, k + 2]; inf where one side is not finite.

    NaN where both are not finite, or where a side has no digest: nothing can be said of such a row.
    """
    a, b = left.astype(np.float64), right.astype(np.float64)
    norms = np.stack([a[:, -2], b[:, -2]])
    broken = np.isinf(norms)
    apart = np.sqrt(np.square(a[:, :-2] - b[:, :-2]).mean(1))
    # what the projections miss by chance, norm and peak can't: both are bounds from below
    apart = np.maximum(apart, np.abs(_finite(norms[0]) - _finite(norms[1])))
    apart = np.maximum(apart, np.abs(_finite(a[:, -1]) - _finite(b[:, -1])))
    scale = _finite(norms).max(0)
    out = np.divide(apart, scale, out=np.zeros_like(apart), where=scale > 0)
    out[broken.any(0)] = np.inf
    out[broken.all(0) | np.isnan(norms).any(0)] = np.nan
    return out


def growth(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """float64 [R]: the share by which the right row is longer than the left one; NaN where one is not finite, or 0."""
    a, b = left[:, -2].astype(np.float64), right[:, -2].astype(np.float64)
    known = np.isfinite(a) & np.isfinite(b) & (a > 0)
    apart = np.subtract(b, a, out=np.zeros_like(a), where=known)
    return np.divide(apart, a, out=np.full(a.shape, np.nan), where=known)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0.0)


@functools.lru_cache(maxsize=64)
def _directions(width: int, count: int, seed: int) -> torch.Tensor:
    """float64 [H, k]; the same in every version of numpy and torch, so that processes can compare."""
    rng = np.random.RandomState(np.array([seed & 0xFFFFFFFF, width, count], dtype=np.uint32))
    return torch.from_numpy(rng.standard_normal((width, count)))
