"""Figures of a drift d [n] = train − rollout (natural logs) in groups of tokens, and effective sample sizes of weights.

Groups of an axis hold for runs of tokens: sums are taken over runs [R] once, and added up for each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.contracts import TOLERANCES
from mmpack.parity.drift_contrasts import (
    FEW_SAMPLES,
    Contrast,
    Found,
    Table,
    comparable,
    told_apart,
)
from mmpack.parity.drift_tokens import Axis, axes_of
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


def effective_size(log_weights: np.ndarray, level: str) -> EffectiveSize:
    """Effective size of finite log weights [n], n of 1 or more. Weights are divided by the largest: none overflows."""
    plain = _ess(log_weights)
    truncated = _ess(np.minimum(log_weights, np.log(HIGH)))
    cut = float((log_weights > np.log(HIGH)).mean())
    line = weights_line(level, plain, truncated, cut, HIGH)
    return EffectiveSize(level, plain, truncated, cut, HIGH, line)


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


NONE = TOLERANCES["engines_mean"].value  # a mean |d| that two engines in fp32 have
MANY = 0.99  # a share of weights that counts as all of them
_AFTER = {
    "after": "after a picture or video",
    "image": "after a picture",
    "video": "after a video",
    "near": "right after a picture or video",
    "near image": "right after a picture",
    "near video": "right after a video",
    "audio": "after an audio",
    "near audio": "right after an audio",
    "before": "before the first picture or video",
}
_SAMPLES = {
    "media": "in samples with pictures or video",
    "image": "in samples with pictures",
    "video": "in samples with video",
    "audio": "in samples with audio",
    "both": "in samples with pictures and video",
    "text": "in samples of text only",
}
_LOOK = {
    "after": "positions (mRoPE), pixels or the vision tower",
    "near": "the end of the medium: how embeddings are merged, the mask around it",
    "before medium": "not the media themselves: the prompt's text, or tokens that see what comes later",
    "media": "positions, pixels or the vision tower; and how samples with media are batched",
    "text": "the path of samples without media: how they are batched, their positions",
    "older": "stale weights: these tokens are not of the trainer's weights",
    "newer": "the weights sent since then: compare checksums",
    "one version": "the weights sent as that version: compare checksums",
    "later turns": "context that was encoded again between turns: compare the ids of each turn",
    "early turns": "what later turns no longer have: dropped reasoning, an evicted picture",
    "one turn": "what that turn has of its own: compare its ids",
    "position": "the KV cache or rotary positions (base, scaling, dtype)",
    "position limit": "a limit at that position: a window, rotary scaling, a chunk of prefill",
    "early position": "the beginning of the sample: system prompt, padding, the first attended token",
    "response": "the KV cache while decoding, or weights that changed while it was written",
    "early response": "where prompt and response meet: the last row of prefill, a template",
    "part": "what happens in that range",
    "length": "long samples: rotary scaling, a window, how they are batched",
    "short": "short samples: how they are batched or padded",
}


# what to look at where drift is late, where it is early, where it begins at a limit
_RANGES = {
    "position": ("position", "early position", "position limit"),
    "response": ("response", "early response", "response"),
    "length": ("length", "short", "length"),
}
_GROWS = {
    "position": "position",
    "response": "position in the response",
    "length": "the sample's length",
}


def suggestions(
    found: Sequence[Found],
    compared: Sequence[str],
    trainer: str | None,
    same: bool,
    few: str = "",
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A line by axis, and those of all together, the strongest first.

    Args: `compared`: axes of which two groups have enough tokens. `trainer`: its version. `same`: a drift of which
    nothing stands out is to be told. `few`: where a few samples have most of it, which.
    """
    lines: dict[str, str] = {}
    for one in found:
        lines[one.best.axis] = line(one.best, trainer)
        for other in one.as_good:
            lines[other.axis] = f"{line(other, trainer)} (as {one.best.axis} does: the same tokens)"
    together = tuple(lines.values())
    for one in found:
        for name in one.follows:
            lines.setdefault(name, f"stands out only as far as {found[0].best.axis} explains it")
    if not found and same and few:
        together = (few,)
    elif not found and same and compared:
        together = (
            f"not told apart by {', '.join(compared)}: look at what all tokens share: dtype, temperature, kernels",
        )
    return lines, together


def line(c: Contrast, trainer: str | None) -> str:
    """Where the drift is, how much of it, and what to look at."""
    where, look = _read(c, trainer)
    if c.kind in ("grows", "falls"):
        figures = f"{c.times:.3g} times over all; mean |Δ| {c.low:.1e} to {c.high:.1e}"
        return f"{where} ({figures}): look at {look}"
    size = "only" if c.low <= NONE else f"{c.times:.3g} times larger"
    figures = f"mean |Δ| {c.high:.1e}, elsewhere {c.low:.1e}"
    return f"{size} {where} ({figures}): look at {look}"


def few_samples(names: Sequence[str], all_of: int, share: float, high: float, low: float) -> str:
    """Name a few of the samples that have most of the drift, their share of all |d|, mean |d| there and elsewhere."""
    shown = ", ".join(f"{name!r:.60}" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    figures = f"mean |Δ| {high:.1e}, elsewhere {low:.1e}"
    return (
        f"mostly in {len(names)} of {all_of} samples, {shown}{more}: {share:.0%} of it ({figures}): look at them, "
        "and what they have that others don't"
    )


def _read(c: Contrast, trainer: str | None) -> tuple[str, str]:
    """Where a contrast's high side is, and what to look at."""
    names = [c.names[g] for g in c.groups]
    match c.axis:
        case "medium":
            key = "near" if c.kind.startswith("near") else c.kind
            look = {"near": "near", "before": "before medium"}.get(key, "after")
            return _AFTER[c.kind], _LOOK[look]
        case "modality":
            return _SAMPLES[c.kind], _LOOK["text" if c.kind == "text" else "media"]
        case "version":
            return _of_versions(c, names, trainer)
        case "turn":
            where = {"from": f"from turn {names[0]} on", "before": f"up to turn {names[-1]}"}
            look = {"from": "later turns", "before": "early turns"}.get(c.kind, "one turn")
            return where.get(c.kind, f"in turn {names[0]}"), _LOOK[look]
    late, early, limit = _RANGES[c.axis]
    look = {"grows": late, "falls": early, "from": limit, "before": early}.get(c.kind, "part")
    return _of_range(c, names), _LOOK[look]


def _of_range(c: Contrast, names: Sequence[str]) -> str:
    """Bins are named `3` or `3 to 7`."""
    low, high = names[0].split(" ")[0], names[-1].split(" ")[-1]
    if c.kind in ("grows", "falls"):
        return f"{c.kind} with {_GROWS[c.axis]}"
    if c.axis == "length":
        size = {"from": f"{low} tokens or more", "before": f"{high} tokens or fewer"}
        return f"in samples of {size.get(c.kind, f'{low} to {high} tokens')}"
    token = "token" if c.axis == "position" else "response token"
    where = {"from": f"from {token} {low} on", "before": f"up to {token} {high}"}
    return where.get(c.kind, f"at {token}s {low} to {high}")


def _of_versions(c: Contrast, names: Sequence[str], trainer: str | None) -> tuple[str, str]:
    """With the trainer's version, tokens of others are stale; without it only the order is known."""
    if c.kind == "alone" or (c.kind, len(names)) in (("from", 1), ("before", 1)):
        where = f"in tokens of version {names[0]}"
    else:
        where = f"from version {names[0]} on" if c.kind == "from" else f"up to version {names[-1]}"
    if trainer is not None and trainer in names:
        return where, _LOOK["newer" if c.kind == "from" else "one version"]
    if trainer is not None or c.kind == "before":
        return where, _LOOK["older"]
    return where, _LOOK["newer" if c.kind == "from" else "one version"]


def weights_line(level: str, plain: float, truncated: float, cut: float, high: float) -> str:
    """Say what the effective sample sizes mean for weights."""
    of = f"{level}s"
    text = f"weights keep {plain:.1%} of the {of}"
    if plain >= MANY:
        return f"{text}: a correction changes little"
    text += f", cut at {high:g} {truncated:.1%} (cuts {cut:.2%})"
    if truncated >= MANY:
        return f"{text}: a few large weights did it, and truncation mends it"
    if truncated < 0.5:
        return f"{text}: most of the batch is lost to the drift; mend it before you correct for it"
    return f"{text}: a correction adds variance"
