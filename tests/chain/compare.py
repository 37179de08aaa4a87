"""A layout's record against the reference's (each sample by itself), and both against an exact one of a wider dtype.

Two runs of one dtype are not each other's oracle: a layout is within the contract if its error from the exact values
is at most 1.5 times the reference's, as for parameter gradients (`mmpack.contracts`), or the floor of its dtype.
Gradients of weights are held twice: all of a stage together, and each kind of weight by itself, at most 3 times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from chain.step import KL_COEF, Cells, Problem, Record
from chain.tape import STAGES, TOKENS, Key, stage_of_weight
from torch import Tensor

from benchmarks.step.kinds import parts_of_weight
from mmpack.contracts import TOLERANCES, parameter_gradient_bound

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
SEPARATE, OF_A_KIND = "parameter_gradient_vs_separate", "parameter_gradient_of_a_kind"
VS_REFERENCE = TOLERANCES[SEPARATE].value
CHUNK = 1 << 24  # entries that are compared at once


@dataclass(frozen=True)
class Row:
    """One stage of one run; `direction`: "forward", "backward" (gradients to activations), or "weights" (to weights).

    `kind`: of the stage's weights only those of one kind (`parts_of_weight`); "" for all.
    `max_difference`: the largest from the reference; `peak_ulps`: the same in units in the last place of the largest
    value. `error`, `reference_error`: from the exact values, of the `place` that is nearest its bound, `allowed`:
    relative Frobenius norms, of weights over all of the row's; of TOKENS the largest absolute one.
    """

    axis: str
    value: str
    stage: str
    direction: str
    kind: str
    place: str
    max_difference: float
    peak_ulps: float
    equal: bool
    error: float
    reference_error: float
    allowed: float
    within: bool


@dataclass
class _Found:
    """Numbers of one place; `apart`, `theirs` and `size`: of the run's error, the reference's, and the exact values."""

    place: str
    absolute: bool = False  # largest differences, else sums of squares
    difference: float = 0.0
    peak: float = 0.0  # of the reference
    unequal: int = 0
    apart: float = 0.0
    theirs: float = 0.0
    size: float = 0.0
    allowed: float = 0.0

    def error(self, of: float) -> float:
        return of if self.absolute else (of / (self.size or 1.0)) ** 0.5

    @property
    def share(self) -> float:
        """Of what is allowed; where bits must be equal, what differs."""
        error = self.error(self.apart)
        if self.allowed == 0 or not math.isfinite(error):
            return math.inf if self.unequal else 0.0
        return error / self.allowed


def compare(
    axis: str,
    value: str,
    run: Record,
    reference: Record,
    exact: Record,
    problem: Problem,
    equal: frozenset[tuple[str, str]] = frozenset(),
) -> list[Row]:
    """Return rows of all stages. What the reference has and the run has not, a place, a row or a gradient, is beyond.

    `equal`: stages and directions where bits must be equal; all else is bounded.
    """
    slopes = _slopes(exact, problem)
    dtype = next(iter(reference.parameters.values())).dtype
    half = dtype.itemsize == 2
    nats = _logprob_bound(reference, exact, half)
    out = []

    def add(stage: str, direction: str, found: list[_Found], kind: str = "") -> None:
        unit = torch.finfo(torch.float32 if stage in TOKENS else dtype).eps
        worst = max(found, key=lambda f: f.share)
        out.append(
            Row(
                axis,
                value,
                stage,
                direction,
                kind,
                worst.place,
                max(f.difference for f in found),
                max(f.difference / _last_place(f.peak, unit) for f in found),
                not any(f.unequal for f in found),
                worst.error(worst.apart),
                worst.error(worst.theirs),
                worst.allowed,
                worst.share <= 1,
            )
        )

    for stage in STAGES:
        for direction in (FORWARD, BACKWARD):
            found = []
            for key in (key for key in reference.cells if key[0] == stage):
                triple = _triple(direction, run.cells.get(key), reference.cells[key], exact.cells[key])  # fmt: skip
                if triple is None:
                    continue
                absolute = (stage, direction) in slopes
                one = _measured(key[1], *triple, torch.float32 if stage in TOKENS else dtype, absolute)  # fmt: skip
                found.append(one)
                if (stage, direction) in equal:
                    continue
                if not absolute:
                    one.allowed = parameter_gradient_bound(one.error(one.theirs), half=half)
                    continue
                limit = slopes[stage, direction] * nats
                if stage != "logprob":  # what the operator itself may be off comes on top
                    limit += TOLERANCES["loss"].value * max(1.0, _largest(triple[2]))
                one.allowed = max(VS_REFERENCE * one.theirs, limit)
            if found:
                add(stage, direction, found)
        kinds = _weights(stage, run, reference, exact, dtype)
        if kinds:
            every = [replace(one) for found in kinds.values() for one in found]
            add(stage, WEIGHTS, _held_together(every, half, SEPARATE))
        for kind, found in kinds.items():
            add(stage, WEIGHTS, _held_together(found, half, OF_A_KIND), kind)
    return out


def _triple(
    direction: str, mine: Cells | None, theirs: Cells, true: Cells
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Values or gradients of the run, the reference and the exact copy; NaN is what a run lacks."""
    lost = torch.full_like(theirs.values, torch.nan)
    if direction == FORWARD:
        return (lost if mine is None else mine.values), theirs.values, true.values
    if theirs.gradient is None:
        return None
    if mine is None or mine.gradient is None:
        return lost, theirs.gradient, _gradient(true, theirs.of)
    return mine.gradient, _gradient(theirs, mine.of), _gradient(true, mine.of)


def _gradient(cells: Cells, of: Tensor) -> Tensor:
    """The gradient, rows that share one in `of` added at the first of them."""
    assert cells.gradient is not None
    return torch.zeros_like(cells.gradient).index_add_(0, of, cells.gradient)


def _measured(
    place: str, a: Tensor, b: Tensor, c: Tensor, unit: torch.dtype, absolute: bool
) -> _Found:
    """Numbers of a run's values, the reference's and the exact ones, of one shape; in pieces, which bounds memory."""
    out = _Found(place, absolute)
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    for one, other, true in zip(*(x.reshape(-1).split(CHUNK) for x in (a, b, c)), strict=True):
        out.unequal += int((one.to(unit) != other.to(unit)).sum())  # NaN among them
        x, y, true = one.to(wide), other.to(wide), true.to(wide)
        out.difference = _most(out.difference, (x - y).abs().max())
        out.peak = _most(out.peak, y.abs().max())
        if absolute:
            out.apart = _most(out.apart, (x - true).abs().max())
            out.theirs = _most(out.theirs, (y - true).abs().max())
        else:
            out.apart += float((x - true).square().sum())
            out.theirs += float((y - true).square().sum())
            out.size += float(true.square().sum())
    return out


def _most(a: float, b: Tensor) -> float:
    """The larger one; NaN stays."""
    value = float(b)
    return value if math.isnan(value) or value > a else a


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _last_place(peak: float, eps: float) -> float:
    """The unit in the last place of a value; of 0 that of 1."""
    return eps * 2.0 ** math.floor(math.log2(peak)) if 0 < peak < math.inf else eps


def _weights(
    stage: str, run: Record, reference: Record, exact: Record, dtype: torch.dtype
) -> dict[str, list[_Found]]:
    """Numbers of the stage's weights by kind."""
    out: dict[str, list[_Found]] = {}
    for name, theirs in reference.parameters.items():
        if stage_of_weight(name) != stage:
            continue
        mine = run.parameters.get(name)
        mine = torch.full_like(theirs, torch.nan) if mine is None else mine.reshape(theirs.shape)
        true = exact.parameters[name].reshape(theirs.shape)
        parts = [parts_of_weight(name, x) for x in (mine, theirs, true)]
        for kind in parts[1]:
            found = _measured(name, *(part[kind] for part in parts), dtype, False)
            out.setdefault(kind, []).append(found)
    return out


def _held_together(found: list[_Found], half: bool, share: str) -> list[_Found]:
    """Errors become those of all of these weights together, as in the contract; the furthest off is first."""
    for one in found:
        one.allowed = parameter_gradient_bound(one.error(one.theirs), half=half, share=share)
    found = sorted(found, key=lambda one: one.share, reverse=True)
    total = {part: sum(getattr(f, part) for f in found) for part in ("apart", "theirs", "size")}
    found = [replace(one, **total) for one in found]
    for one in found:
        one.allowed = parameter_gradient_bound(one.error(one.theirs), half=half, share=share)
    return found


def _logprob_bound(reference: Record, exact: Record, half: bool) -> float:
    """nats: 1.5 × the reference's largest error, or what the contract allows two layouts."""
    mine, true = (r.cells["logprob", "logprob"].values.double() for r in (reference, exact))
    least = TOLERANCES["layouts"].value
    if half:
        least = parameter_gradient_bound(0.0, half=True) * max(1.0, _largest(true))
    return max(VS_REFERENCE * _largest(mine - true), least)


def _slopes(exact: Record, problem: Problem) -> dict[Key, float]:
    """How far ratio, KL, loss and gradients move, to first order, with logprobs that are 1 nat off."""
    cells = {name: exact.cells[name, name] for name in ("logprob", "ratio", "kl")}
    steep, of_kl = cells["logprob"].gradient, cells["kl"].gradient
    assert steep is not None and of_kl is not None
    r = _largest(cells["ratio"].values)
    return {
        ("logprob", FORWARD): 1.0,
        ("logprob", BACKWARD): _largest(steep) + KL_COEF,
        ("ratio", FORWARD): r,
        ("ratio", BACKWARD): r * _largest(problem.advantages),
        ("kl", FORWARD): max(1.0, _largest(of_kl)),
        ("kl", BACKWARD): 1.0,
        ("loss", FORWARD): float(steep.abs().sum()),
    }
