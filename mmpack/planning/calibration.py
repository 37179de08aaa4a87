"""A cost model fitted to a few measured steps: one factor for each part of it, none negative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_number, kind_of, require
from mmpack.planning.cost import RATES, CostModel
from mmpack.planning.counts import Counts, counts_of_batch, summed

PARTS = {
    "decoder": ("row",),
    "attention": ("pair", "window_pair", "key"),
    "waves": ("wave",),
    "head": ("loss_token",),
    "tower": ("patch", "frame_pair", "tile_pair", "audio_frame"),
    "batch": ("batch",),
}
LEAST_SINGULAR = (
    0.01  # of parts' seconds, each scaled to length 1: below it steps can't tell two of them apart
)


@dataclass(frozen=True)
class Calibration:
    """`cost`: the fitted model. `factors`: of each part that was fitted, its seconds over the base's; of `batch`, for
    which a config says nothing, seconds of a micro-batch. `errors`: predicted over measured seconds, minus 1, of each
    step; `left_out`: the same where the step was predicted from the others, None where those can't tell the parts
    apart."""

    cost: CostModel
    factors: dict[str, float]
    errors: list[float]
    left_out: list[float | None]

    @property
    def error(self) -> float:
        """Mean of the left-out errors' sizes; of the fit's own where no step could be left out."""
        return _mean([e for e in self.left_out if e is not None] or self.errors)

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(map(abs, [e for e in self.left_out if e is not None] or self.errors))

    def lines(self) -> list[str]:
        factors = ", ".join(f"{name} {factor:.3g}" for name, factor in self.factors.items())
        kind = "left out" if any(e is not None for e in self.left_out) else "fitted"
        return [
            f"{len(self.errors)} steps: seconds of a step are off by {self.error:.1%} on average, by {self.worst:.1%} "
            f"at worst ({kind})",
            f"factors: {factors}",
        ]

    def save(self, path: str | Path) -> None:
        """Write the cost as JSON, for `CostModel.load` and `mmpack plan --cost`. Raises PlanError."""
        self.cost.save(path)


def calibrate(
    measured: Sequence[tuple[Any, float]], base: CostModel, parts: Sequence[str] | None = None
) -> Calibration:
    """Fit the parts of a cost model to measured steps.

    Args: `measured`: of each step what ran (a PackedBatch, its `Counts`, or a list of those of its micro-batches, one
    rank's) and its seconds, forward and backward, on a device that was waited for. `base`: `cost_model(config)`.
    `parts`: of decoder (products of rows), attention, waves, head, tower and batch (what each micro-batch takes
    whatever it holds); None: all that the steps hold. A part that is left out keeps its proportion to the decoder.

    The factors are those of least sum of squared relative errors, by non-negative least squares (Lawson and Hanson
    1974, in scipy). Raises ArgumentError for fewer steps than one more than the parts, and for steps that can't tell
    two parts apart; MissingExtraError without scipy.

    Example: seconds by a device twice as slow as the base, and 10 ms for each micro-batch.
        >>> from mmpack.planning import CostModel, Counts, calibrate
        >>> base = CostModel(row=1e-6, patch=1e-6)
        >>> held = [Counts(rows=r, patches=p) for r, p in ((1000, 0), (4000, 0), (9000, 5000), (2000, 6000))]
        >>> steps = [(counts, 2 * base.seconds(counts) + 0.01) for counts in held]
        >>> found = calibrate(steps, base)
        >>> {name: round(factor, 6) for name, factor in found.factors.items()}
        {'decoder': 2.0, 'tower': 2.0, 'batch': 0.01}
        >>> round(found.cost.seconds(Counts(rows=5000)), 6)
        0.02
    """
    counts, seconds = _checked(measured, base)
    columns = _columns(counts, base, _asked(parts))
    names = list(columns)
    if len(counts) < len(names) + 1:
        raise ArgumentError(
            f"calibrate: {len(counts)} steps can't fit {len(names)} parts ({', '.join(names)}). "
            f"Fix: measure {len(names) + 1} or more, or pass fewer parts"
        )
    # a step's seconds, of each part, over those measured
    shares = np.stack(list(columns.values()), axis=1) / seconds[:, None]
    if together := _together(shares, names):
        raise ArgumentError(
            f"calibrate: the steps can't tell {together[0]} from {together[1]}, since both grow together. "
            "Fix: measure micro-batches of other sizes and kinds, or leave one out of parts"
        )
    factors = _fit(shares)
    left_out: list[float | None] = []
    for i in range(len(counts)):
        others = np.delete(shares, i, axis=0)
        known = _together(others, names) is None
        left_out.append(float(shares[i] @ _fit(others) - 1) if known else None)
    fitted = dict(zip(names, factors.tolist(), strict=True))
    errors = (shares @ factors - 1).tolist()
    found = Calibration(_scaled(base, fitted), fitted, errors, left_out)
    return replace(found, cost=replace(found.cost, error=found.error))


def _checked(
    measured: Sequence[tuple[Any, float]], base: CostModel
) -> tuple[list[Counts], np.ndarray]:
    if not isinstance(base, CostModel):
        raise ArgumentError(
            f"calibrate: base is {kind_of(base)}. Fix: pass cost_model(model.config)"
        )
    counts, seconds = [], []
    for i, step in enumerate(measured):
        if not isinstance(step, tuple | list) or len(step) != 2:
            raise ArgumentError(
                f"calibrate: measured[{i}] is {kind_of(step)}. Fix: pass pairs of a batch and its seconds"
            )
        check_number(
            "calibrate",
            f"measured[{i}]",
            step[1],
            above=0,
            fix="pass seconds as they were measured",
        )
        counts.append(_counts(step[0], base, i))
        seconds.append(float(step[1]))
    return counts, np.asarray(seconds)


def _counts(what: Any, base: CostModel, number: int) -> Counts:
    if isinstance(what, Counts):
        return what
    if hasattr(what, "segment_offsets"):
        return counts_of_batch(what, base.spans)
    if isinstance(what, list | tuple) and what:
        return summed(_counts(part, base, number) for part in what)
    raise ArgumentError(
        f"calibrate: measured[{number}] holds {kind_of(what)}. "
        "Fix: pass a PackedBatch, its Counts, or a list of the Counts of a step"
    )


def _asked(parts: Sequence[str] | None) -> list[str] | None:
    if parts is None:
        return None
    odd = [p for p in parts if p not in PARTS] if not isinstance(parts, str) else [parts]
    if odd or not set(parts) - {"batch"}:
        raise ArgumentError(
            f"calibrate: parts is {parts!r:.80}. Fix: pass a list of some of {', '.join(PARTS)}, and not batch alone"
        )
    return [name for name in PARTS if name in parts]


def _columns(
    counts: list[Counts], base: CostModel, asked: list[str] | None
) -> dict[str, np.ndarray]:
    """Seconds of each part in each step, by the base; parts that no step holds are left out.

    What is not asked for is added to the first part, which is the decoder if that is asked for.
    """
    held = np.asarray(counts, dtype=np.float64)
    rates = np.asarray([_rate(base, name) for name in RATES])
    by_rate = dict(zip(RATES, (held * rates).T, strict=True))
    columns = {
        name: np.sum([by_rate[rate] for rate in of], axis=0)
        for name, of in PARTS.items()
        if asked is None or name in asked or name != "batch"
    }
    columns = {name: column for name, column in columns.items() if column.any()}
    if asked is not None:
        kept = [name for name in asked if name in columns]
        if not kept or kept == ["batch"]:
            raise ArgumentError(
                f"calibrate: no step has any of {', '.join(asked)}. Fix: use other parts, or None for all"
            )
        rest = [column for name, column in columns.items() if name not in asked]
        columns = {name: columns[name] for name in kept}
        columns[kept[0]] = columns[kept[0]] + np.sum(rest, axis=0)
    return columns


def _rate(base: CostModel, name: str) -> float:
    """A micro-batch's own seconds have no base that a config could say: they are fitted as seconds."""
    rate = float(getattr(base, name))
    return rate or (1.0 if name == "batch" else 0.0)


def _together(shares: np.ndarray, names: list[str]) -> tuple[str, str] | None:
    """Two parts that the steps can't tell apart."""
    if len(shares) < len(names):
        return names[0], names[-1]
    length = np.linalg.norm(shares, axis=0)
    if not length.all():
        lacking = names[int(np.argmin(length))]
        return lacking, next(name for name in [*names, "nothing"] if name != lacking)
    unit = shares / length
    if len(names) == 1 or np.linalg.svd(unit, compute_uv=False)[-1] > LEAST_SINGULAR:
        return None
    alike = unit.T @ unit
    np.fill_diagonal(alike, -1.0)
    a, b = np.unravel_index(int(np.argmax(alike)), alike.shape)
    return names[min(a, b)], names[max(a, b)]


def _fit(shares: np.ndarray) -> np.ndarray:
    solve = require("scipy.optimize", "planning", "calibrate").nnls
    return np.asarray(solve(shares, np.ones(len(shares)))[0])


def _scaled(base: CostModel, factors: dict[str, float]) -> CostModel:
    """Rates times their part's factor; of a part that was not fitted, times that of the first."""
    first = next(iter(factors.values()))
    rates: dict[str, float] = {}
    for part, names in PARTS.items():
        factor = factors.get(part, 1.0 if part == "batch" else first)
        fitted = part in factors
        rates |= {
            name: factor * (_rate(base, name) if fitted else getattr(base, name)) for name in names
        }
    return replace(base, **rates)  # type: ignore[arg-type]


def _mean(errors: list[float]) -> float:
    return float(np.mean(np.abs(errors)))
