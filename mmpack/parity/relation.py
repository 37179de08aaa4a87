"""Relation of two sets of logprobs of the same tokens: shifted by one, of another base or temperature.

`rollout` and `train`: one float64 [n] per sample, natural logs if all is well. Each relation is named only where
numbers fit it and none of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEW = 16  # tokens that moved; fewer fit anything
MOVED = 1e-3  # by which two engines in fp32 may differ at one token
SOME = 3  # tokens; one or two may be noise
BETTER = 10.0  # a relation leaves at most this part of the drift
# train over rollout
BASES = {
    "train's are of base 2, the rollout's natural": 1 / np.log(2),
    "the rollout's are of base 2, train's natural": np.log(2),
    "train's are of base 10, the rollout's natural": 1 / np.log(10),
    "the rollout's are of base 10, train's natural": np.log(10),
}
SURE = 1.0  # log odds above which a token is surely the likeliest one (p > 0.73)
FAR = 9.0  # log odds beyond which float32 has no digits left
SLACK = 0.1  # log odds by which two engines may differ
STEP = 0.02  # of temperatures' ratio: less is no other temperature

Logprobs = Sequence[np.ndarray]


def relation(rollout: Logprobs, train: Logprobs) -> tuple[str, str] | None:
    """(cause, evidence) of the one relation that the numbers fit; None if they fit none, or too few are there."""
    r, t = np.concatenate(rollout), np.concatenate(train)
    if not _tell(r, t):
        return None
    drift = float(np.abs(t - r).mean())
    found = [*_shifts(rollout, train, drift), *_bases(r, t, drift)]
    if len(found) == 1:
        return found[0]
    return None if found else _temperature(r, t)


def excluded(rollout: Logprobs, train: Logprobs) -> set[str]:
    """Causes of `relation` that the numbers rule out, where it is None."""
    r, t = np.concatenate(rollout), np.concatenate(train)
    if not _tell(r, t):
        return set()
    x, y = _resolved_log_odds(r, t)
    ranges = [_ratios(x, y, sharper) for sharper in (True, False)]
    fits = any(low <= high for low, high in ranges)
    return {"logprob_shift", "logprob_base"} | (set() if fits else {"temperature"})


def fits_temperatures(rollout: Logprobs, train: Logprobs, ratio: float) -> bool:
    """Whether every token allows the rollout's temperature to be `ratio` times train's."""
    x, y = _resolved_log_odds(np.concatenate(rollout), np.concatenate(train))
    low, high = _ratios(x, y, sharper=ratio > 1)
    return low <= ratio <= high


def _tell(r: np.ndarray, t: np.ndarray) -> bool:
    finite = bool(np.isfinite(r).all() and np.isfinite(t).all())
    return finite and int((np.abs(t - r) > MOVED).sum()) >= FEW


def _resolved_log_odds(r: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log odds of both, where float32 resolves them."""
    x, y = _log_odds(r), _log_odds(t)
    kept = (np.abs(x) < FAR) & (np.abs(y) < FAR)
    return x[kept], y[kept]


def _shifts(rollout: Logprobs, train: Logprobs, drift: float) -> list[tuple[str, str]]:
    """Train's logprob of each token is the rollout's of the next, or of the one before."""
    out = []
    for by, which in ((1, "the token after it"), (-1, "the token before it")):
        pairs = [
            (a[1:], b[:-1]) if by == 1 else (a[:-1], b[1:])
            for a, b in zip(rollout, train, strict=True)
        ]
        a, b = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if len(a) >= FEW and (left := float(np.abs(a - b).mean())) * BETTER <= drift:
            evidence = f"train's logprob of each token is the rollout's of {which}"
            out.append(("logprob_shift", f"{evidence}: {_figures(left, drift)}"))
    return out


def _bases(r: np.ndarray, t: np.ndarray, drift: float) -> list[tuple[str, str]]:
    """One ratio at all tokens; a temperature gives each token a ratio of its own."""
    out = []
    for which, ratio in BASES.items():
        left = float(np.abs(t - ratio * r).mean())
        if left * BETTER <= drift and _fits_each(r, t, ratio):
            evidence = f"train / rollout is {ratio:.4f} at every token ({which})"
            out.append(("logprob_base", f"{evidence}: {_figures(left, drift)}"))
    return out


def _fits_each(r: np.ndarray, t: np.ndarray, ratio: float) -> bool:
    """Whether likely and unlikely tokens give one ratio: the two halves of the drift, each for itself."""
    order = np.argsort(r)
    halves = np.array_split(order, 2)
    return all(
        float(np.abs(t[half] - ratio * r[half]).sum()) * BETTER
        <= float(np.abs(t[half] - r[half]).sum())
        for half in halves
    )


def _temperature(r: np.ndarray, t: np.ndarray) -> tuple[str, str] | None:
    """Whether one other temperature explains every token.

    With b = rollout's temperature / train's, p' = p^b / sum of all p^b. The rest, 1 - p, adds most to that sum (b < 1),
    or least (b > 1), where it is one token; so log odds obey y >= b x for b > 1, and y <= b x for b < 1. Weights or
    dtypes move log odds by as much at sure tokens as at others; a temperature moves them in proportion: y - x grows
    with x.
    """
    x, y = _resolved_log_odds(r, t)
    sure, moved = x > SURE, np.sort(t - r)
    if sure.sum() < FEW or np.ptp(x[sure]) < 1:
        return None
    if moved[SOME - 1] > -SLACK or moved[-SOME] < SLACK:
        return None  # all rise, or all fall: so they do where one side drops ids (top-p), not by a temperature
    for sharper in (True, False):
        low, high = _ratios(x, y, sharper)
        slope, error = _slope(x[sure], (y - x)[sure])
        other = low <= high and abs((high if sharper else low) - 1) >= STEP
        if other and (slope > 0) == sharper and abs(slope) > max(5 * error, STEP):
            return "temperature", (
                f"every token allows the rollout's temperature to be {low:.2f} to {high:.2f} times train's, and "
                "log odds differ in proportion to themselves, as neither weights nor dtypes make them"
            )
    return None


def _ratios(x: np.ndarray, y: np.ndarray, sharper: bool) -> tuple[float, float]:
    """The b that every token allows, above 1 if `sharper`, else below: (low, high), low > high if there is none."""
    if not sharper:  # y <= b x is -y >= b (-x)
        low, high = _allowed(-x, -y)
        return max(low, 0.0), min(high, 1.0)
    low, high = _allowed(x, y)
    return max(low, 1.0), high


def _allowed(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(low, high) of b with y + SLACK >= b x at every token."""
    ahead, behind = x > SLACK, x < -SLACK
    high = float(((y + SLACK) / np.where(ahead, x, 1.0))[ahead].min(initial=np.inf))
    low = float(((y + SLACK) / np.where(behind, x, 1.0))[behind].max(initial=-np.inf))
    return low, high


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares: y's rise with x, and its standard error."""
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    left = y - slope * x
    return slope, float(np.sqrt(left @ left / max(len(x) - 2, 1) / (x @ x)))


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    inside = np.clip(logprobs, -1e3, -1e-12)
    return inside - np.log(-np.expm1(inside))


def _figures(left: float, drift: float) -> str:
    return f"mean difference {left:.1e} instead of {drift:.1e}"
