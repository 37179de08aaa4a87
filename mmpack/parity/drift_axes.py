"""Figures of a drift d [n] = train − rollout (natural logs) in groups of tokens, and effective sample sizes of weights.

Groups of an axis hold for runs of tokens: sums are taken over runs [R] once, and added up for each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.parity.drift_contrasts import FEW_SAMPLES, Table, comparable, told_apart
from mmpack.parity.drift_tokens import Axis, axes_of
from mmpack.parity.drift_words import few_samples, suggestions, weights_line
from mmpack.schema.sample import Sample

HIGH = 2.0  # where TIS cuts weights, as `policy_loss` does unless told otherwise
BOUND = 20.0  # of log weights, as in `mmpack.losses`
FLOOR = 1e-6  # of |d|: logprobs in float32 resolve no less
COLUMNS = ("group", "tokens", "samples", "mean |Δ|", "max |Δ|", "k3", "ESS")
OUTLYING = 10.0  # times what the middle sample drifts
SURE_BINS = -np.geomspace(10, 1e-4, 12)  # edges of the rollout's logprob, unlikely to sure


@dataclass(frozen=True)
class DriftGroup:
    """The tokens of one group that are finite on both sides. `samples`: how many samples they are of.

    `mean` keeps the sign. `k3`: mean of exp(d) − 1 − d. `ess`: Kish's effective sample size of exp(d), as a share.
    """

    name: str
    tokens: int
    samples: int
    mean_abs: float
    max_abs: float
    mean: float
    k3: float
    ess: float

    @property
    def row(self) -> tuple[str | int | float, ...]:
        """Row of a table, by COLUMNS: three digits of each figure."""
        figures = (float(f"{x:.3g}") for x in (self.mean_abs, self.max_abs, self.k3, self.ess))
        return self.name, self.tokens, self.samples, *figures


@dataclass(frozen=True)
class DriftAxis:
    """The groups of one axis that have tokens, in order. `suggests`: what they point to, else ""."""

    groups: tuple[DriftGroup, ...]
    suggests: str = ""


@dataclass(frozen=True)
class EffectiveSize:
    """Kish's effective sample size (Σw)² / (n · Σw²) of the weights w = exp(train − rollout), as a share of n.

    Kish, Survey Sampling, 1965, section 11.7. `truncated`: of min(w, high), which TIS takes (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"). `cut`: the share of weights above `high`.
    `level`: weights of tokens, or of samples (exp of the sum over their loss tokens).
    """

    level: str
    plain: float
    truncated: float
    cut: float
    high: float
    suggests: str


def effective_size(log_weights: np.ndarray, level: str, high: float = HIGH) -> EffectiveSize:
    """Effective size of finite log weights [n], n of 1 or more. Weights are divided by the largest: none overflows."""
    plain = _ess(log_weights)
    truncated = _ess(np.minimum(log_weights, np.log(high)))
    cut = float((log_weights > np.log(high)).mean())
    line = weights_line(level, plain, truncated, cut, high)
    return EffectiveSize(level, plain, truncated, cut, high, line)


def _ess(log_weights: np.ndarray) -> float:
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


@dataclass(frozen=True)
class Split:
    """Result of `split`. `suggests`: what the axes point to together, the strongest first."""

    axes: dict[str, DriftAxis]
    weights: tuple[EffectiveSize, ...]
    suggests: tuple[str, ...]
    not_finite: int


def split(
    samples: Sequence[Sample],
    rollout: np.ndarray,
    d: np.ndarray,
    near: int,
    trainer: str | None,
    same: bool,
) -> Split:
    """The drift of the loss tokens of all samples by each axis.

    Args: `rollout`: its logprobs, float64 [n]. `d`: float64 [n]. `near`: see `axes_of`. `trainer`: the version of the
    trainer's weights. `same`: where nothing stands out, say so.
    """
    of, axes = axes_of(samples, near)
    kept = np.isfinite(d) & np.isfinite(rollout)
    lost = len(d) - int(kept.sum())
    if lost == len(d):
        return Split({}, (), (), lost)
    if lost:
        of, d, rollout = of[kept], d[kept], rollout[kept]
        axes = {k: Axis(a.names, a.of[kept], a.ordered, a.loose) for k, a in axes.items()}
    starts = _runs([of, *(axis.of for axis in axes.values())])
    sums = _sums(rollout, d, starts)
    owner = np.unique(of[starts], return_inverse=True)[1]
    groups, tables = {}, {}
    for name, axis in axes.items():
        code = axis.of[starts]
        tables[name] = Table.of(axis, owner, code, sums["count"], sums["size"])
        groups[name] = _groups(axis, code, tables[name], sums)
    found = told_apart(tables, sums["abs"])
    compared = [name for name, table in tables.items() if comparable(table)]
    few = _few([s.sample_id for s in samples], of[starts], sums)
    lines, together = suggestions(found, compared, trainer, same, few)
    by_sample = np.bincount(owner, sums["signed"])
    return Split(
        {name: DriftAxis(groups[name], lines.get(name, "")) for name in axes},
        (effective_size(d, "token"), effective_size(by_sample, "sample")),
        together,
        lost,
    )


def _few(names: Sequence[str], of: np.ndarray, sums: dict[str, np.ndarray]) -> str:
    """Which samples drift OUTLYING times as much as the middle one, where they are few and have half of it all.

    Args: `of` int64 [R]: the sample of each run, a number of `names`.
    """
    tokens, moved = (np.bincount(of, sums[name], len(names)) for name in ("count", "abs"))
    there = tokens > 0
    mean = np.divide(moved, tokens, out=np.zeros(len(names)), where=there)
    high = mean > OUTLYING * np.median(mean[there])
    share = moved[high].sum() / max(moved.sum(), np.finfo(np.float64).tiny)
    if there.sum() < 2 * FEW_SAMPLES or not 0 < high.sum() <= there.sum() / 4 or share < 0.5:
        return ""
    inside, outside = (moved[part].sum() / tokens[part].sum() for part in (high, there & ~high))
    worst = [names[k] for k in np.argsort(-mean)[: int(high.sum())]]
    return few_samples(worst, int(there.sum()), float(share), float(inside), float(outside))


def _runs(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The first token of each run in which no column changes."""
    changes = np.zeros(len(columns[0]), bool)
    changes[0] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _sums(rollout: np.ndarray, d: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Sums of each run, float64 [R]. `size`: log |d| less its mean over tokens of like rollout logprob."""
    moved = np.abs(d)
    bounded = np.clip(d, -BOUND, BOUND)
    weight = np.exp(bounded)
    size = np.log(moved + FLOOR)
    sure = np.searchsorted(SURE_BINS, rollout)
    count, total = np.bincount(sure), np.bincount(sure, size)
    size -= (total / np.maximum(count, 1))[sure]
    with np.errstate(over="ignore"):  # infinite where logprobs are far apart
        k3 = np.expm1(d) - d
    out = {"abs": moved, "signed": d, "k3": k3, "weight": weight}
    out |= {"square": weight * weight, "size": size}
    summed = {name: np.add.reduceat(values, starts) for name, values in out.items()}
    summed["count"] = np.diff(np.append(starts, len(d))).astype(np.float64)
    summed["max"] = np.maximum.reduceat(moved, starts)
    return summed


def _groups(
    axis: Axis, code: np.ndarray, table: Table, sums: dict[str, np.ndarray]
) -> tuple[DriftGroup, ...]:
    count = len(axis.names)
    n = {name: np.bincount(code, values, count) for name, values in sums.items() if name != "max"}
    largest = np.zeros(count)
    np.maximum.at(largest, code, sums["max"])
    samples = (table.count > 0).sum(axis=0)
    return tuple(
        DriftGroup(
            name=name,
            tokens=int(n["count"][g]),
            samples=int(samples[g]),
            mean_abs=float(n["abs"][g] / n["count"][g]),
            max_abs=float(largest[g]),
            mean=float(n["signed"][g] / n["count"][g]),
            k3=float(n["k3"][g] / n["count"][g]),
            ess=float(n["weight"][g] ** 2 / (n["count"][g] * n["square"][g])),
        )
        for g, name in enumerate(axis.names)
        if n["count"][g]
    )
