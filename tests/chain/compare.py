"""A run's record against the reference's (each sample by itself), and both against an exact one of a wider dtype.

Two runs of one dtype are not each other's oracle: a layout is within the contract if its error from the exact values
is at most 1.5 times the reference's, as for parameter gradients (`mmpack.contracts`), or the floor of its dtype.
Gradients of weights are held twice: all of a stage together, and each kind of weight by itself, at most 3 times.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from chain.record import Cells, Key, Record, canonical
from chain.stages import STAGES, TOKENS, stage_of_weight
from chain.ulps import ulps
from torch import Tensor

from benchmarks.step.kinds import parts_of_weight
from mmpack.contracts import TOLERANCES, parameter_gradient_bound

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
DIRECTIONS = (FORWARD, BACKWARD, WEIGHTS)
COLUMNS = ("axis", "value", "stage or kind", "pass", "max diff", "ULPs", "of peak", "unequal", "error", "ref error",
           "allowed", "verdict")  # fmt: skip
VS_REFERENCE = TOLERANCES["parameter_gradient_vs_separate"].value
CHUNK, GPU_CHUNK = 1 << 20, 1 << 26  # entries that are compared at once


@dataclass(frozen=True)
class Row:
    """One stage of one run; `direction`: "forward", "backward" (gradients to activations), or "weights" (to weights).

    `kind`: of the stage's weights only those of one kind (`parts_of_weight`); "" for all.

    `max_difference`, `ulps`: the largest from the reference, as a number and in steps of the dtype, of which there are
    many between two values near 0. `peak_ulps`: the largest difference in units in the last place of the largest value.
    `unequal`: the share of entries that differ.
    `error`, `reference_error`: from the exact values, of the place that is nearest its bound: relative Frobenius norms,
    of weights over all of the row's; of `logprob`, `ratio`, `kl` and `loss` the largest absolute one. `allowed`: for
    `error`; 0 where bits must be equal. `place`: a module, or a weight. `not_run`: why there are no numbers.
    """

    axis: str
    value: str
    stage: str
    direction: str
    max_difference: float | None = None
    ulps: int | None = None
    peak_ulps: float | None = None
    unequal: float | None = None
    equal: bool | None = None
    error: float | None = None
    reference_error: float | None = None
    allowed: float | None = None
    within: bool = True
    place: str = ""
    not_run: str = ""
    kind: str = ""

    @property
    def cells(self) -> tuple[Any, ...]:
        """Of the table, in the order of COLUMNS."""
        assert self.unequal is not None and self.ulps is not None
        assert self.allowed is not None and self.error is not None
        verdict = "equal" if self.equal else "bounded" if self.within else "BEYOND"
        return (
            self.axis, self.value, self.kind or self.stage, self.direction, f"{self.max_difference:.1e}",
            f"{self.ulps:,}", f"{self.peak_ulps:.3g}", f"{self.unequal:.1%}", f"{self.error:.1e}",
            f"{self.reference_error:.1e}", "0" if not self.allowed else f"{self.allowed:.1e}",
            f"{verdict} {'' if self.within else self.place}".strip(),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Equal:
    """What must be equal bit for bit: stages of the forward, of the backward."""

    forward: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()

    def of(self, direction: str) -> frozenset[str]:
        return self.forward if direction == FORWARD else self.backward


@dataclass(frozen=True)
class Bounds:
    """What a run may be off.

    `slopes`: how far what follows logprobs moves with them, by (stage, direction). `dtype`: the model's.
    """

    slopes: dict[Key, float]
    dtype: torch.dtype


@dataclass
class _Found:
    """Numbers of one place; `apart`, `theirs` and `size`: of the run's error, the reference's, and the exact values."""

    place: str
    difference: float = 0.0
    ulps: int = 0
    peak: float = 0.0  # of the reference
    unequal: int = 0
    count: int = 0
    apart: float = 0.0
    theirs: float = 0.0
    size: float = 0.0
    absolute: bool = False  # largest differences, else sums of squares
    allowed: float = 0.0
    missing: bool = False  # the reference has more than the run

    @property
    def error(self) -> float:
        return self.apart if self.absolute else (self.apart / (self.size or 1.0)) ** 0.5

    @property
    def reference_error(self) -> float:
        return self.theirs if self.absolute else (self.theirs / (self.size or 1.0)) ** 0.5

    @property
    def share(self) -> float:
        """Of what is allowed; where bits must be equal, what differs."""
        if self.missing:
            return math.inf
        if self.allowed == 0:
            return math.inf if self.unequal else 0.0
        return self.error / self.allowed if math.isfinite(self.error) else math.inf


def floor(dtype: torch.dtype) -> float:
    """Relative error that is always allowed: what gradients of the dtype may be off."""
    return parameter_gradient_bound(0.0, half=_half(dtype))


def _half(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2


def compare(
    axis: str,
    value: str,
    run: Record,
    reference: Record,
    exact: Record,
    equal: Equal,
    bounds: Bounds,
    *,
    partial: bool = False,
) -> list[Row]:
    """Rows of all stages, forward and backward.

    A stage of which the run has nothing is not run. One of which it has some, and not all that the reference has, is
    beyond: a place, a row, or the gradient of either.

    Args: `exact`: the reference's samples in a wider dtype. `equal`: what must be equal; all else is bounded.
        `partial`: the run may leave rows out, as one behind a cached prefix does.
    """
    out = []
    for stage in STAGES:
        for direction in (FORWARD, BACKWARD):
            keys = [key for key in reference.cells if key[0] == stage]
            each = [_place(k, direction, run, reference, exact, equal, bounds) for k in keys]
            found = [one for one in each if one is not None]
            if found and not partial:
                for key, one in zip(keys, each, strict=True):
                    if not _lacks(direction, run.cells.get(key), reference.cells[key]):
                        continue
                    if one is None:
                        found.append(_lost(key[1]))
                    else:
                        one.missing = True
            out.append(_row(axis, value, stage, direction, found, bounds.dtype))
    for stage in STAGES:
        kinds = _weights(stage, run, reference, exact, bounds.dtype)
        if not kinds:
            continue
        every = [replace(one) for found in kinds.values() for one in found]
        _hold_together(every, bounds.dtype, "parameter_gradient_vs_separate")
        out.append(_row(axis, value, stage, WEIGHTS, every, bounds.dtype))
        for kind, found in kinds.items():
            _hold_together(found, bounds.dtype, "parameter_gradient_of_a_kind")
            out.append(_row(axis, value, stage, WEIGHTS, found, bounds.dtype, kind))
    return out


def _lost(place: str) -> _Found:
    """Of what the run does not have at all."""
    return _Found(place, difference=math.inf, apart=math.inf, missing=True)


def _lacks(direction: str, mine: Cells | None, theirs: Cells) -> bool:
    """Whether the run has fewer rows of a place than the reference, or no gradient where that has one."""
    if direction == FORWARD:
        return mine is None or _fewer(mine.at, theirs.at)
    if theirs.gradient is None:
        return False
    return mine is None or mine.gradient is None or _fewer(mine.gradient_at, theirs.gradient_at)


def _fewer(at: Tensor, than: Tensor) -> bool:
    return not bool(torch.isin(than, at).all())


def _row(
    axis: str,
    value: str,
    stage: str,
    direction: str,
    found: list[_Found],
    dtype: torch.dtype,
    kind: str = "",
) -> Row:
    if not found:
        return Row(axis, value, stage, direction, not_run="not run")
    worst = max(found, key=lambda f: f.share)
    unequal = sum(f.unequal for f in found)
    unit = torch.finfo(_unit(stage, dtype)).eps
    return Row(
        axis,
        value,
        stage,
        direction,
        max(f.difference for f in found),
        max(f.ulps for f in found),
        max(f.difference / _last_place(f.peak, unit) for f in found),
        unequal / max(1, sum(f.count for f in found)),
        unequal == 0 and not any(f.missing for f in found),
        worst.error,
        worst.reference_error,
        worst.allowed,
        worst.share <= 1,
        worst.place,
        kind=kind,
    )


def _last_place(peak: float, eps: float) -> float:
    """The unit in the last place of a value; of 0 that of 1."""
    return eps * 2.0 ** math.floor(math.log2(peak)) if 0 < peak < math.inf else eps


def _unit(stage: str, dtype: torch.dtype) -> torch.dtype:
    """In which ULPs are counted: logprobs and what follows are float32, sums of gradients in the model's."""
    return torch.float32 if stage in TOKENS else dtype


def _place(
    key: Key,
    direction: str,
    run: Record,
    reference: Record,
    exact: Record,
    equal: Equal,
    bounds: Bounds,
) -> _Found | None:
    stage, place = key
    if key not in run.cells or not len(run.cells[key].at):
        return None
    mine, theirs, true = (r.cells[key] for r in (run, reference, exact))
    triple = (
        (mine.values, _placed(theirs)[mine.at], _placed(true)[mine.at])
        if direction == FORWARD
        else _gradients(mine, theirs, true)
    )
    if triple is None:
        return None
    a, b, c = triple
    slope = bounds.slopes.get((stage, direction))
    found = _measured(a, b, c, place, _unit(stage, bounds.dtype), slope is not None)
    if stage in equal.of(direction):
        return found
    if slope is None:
        found.allowed = parameter_gradient_bound(found.reference_error, half=_half(bounds.dtype))
        return found
    limit = slope * _logprob_bound(reference, exact, bounds.dtype)
    if key[0] != "logprob":  # what the operator itself may be off comes on top
        limit += TOLERANCES["loss"].value * max(1.0, _largest(c))
    found.allowed = max(VS_REFERENCE * found.reference_error, limit)
    return found


def _logprob_bound(reference: Record, exact: Record, dtype: torch.dtype) -> float:
    """nats: 1.5 × the reference's largest error, or what the contract allows two layouts."""
    key = next(k for k in exact.cells if k[0] == "logprob")
    mine, true = _placed(reference.cells[key]), _placed(exact.cells[key]).double()
    least = TOLERANCES["layouts"].value
    if dtype.itemsize == 2:
        least = floor(dtype) * max(1.0, _largest(true))
    return max(VS_REFERENCE * _largest(mine.double() - true), least)


def _placed(cells: Cells) -> Tensor:
    """Values [K, D] by canonical row; of a medium that came twice the last."""
    out = cells.values.new_zeros(int(cells.at.max()) + 1, cells.values.shape[1])
    return out.index_copy(0, cells.at, cells.values)


def _gradients(mine: Cells, theirs: Cells, true: Cells) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of the run's rows, and of the other two what the same rows have: the sums of those that share one."""
    if mine.gradient is None or theirs.gradient is None or true.gradient is None:
        return None
    at = mine.gradient_at
    rows = int(max(theirs.gradient_at.max(), at.max())) + 1
    b, c = canonical(theirs, rows), canonical(true, rows)
    assert mine.group is not None
    if len(at.unique()) < len(at):  # media that occur more than once
        return canonical(mine, rows), b, c
    if len(mine.gradient) == len(at):
        return mine.gradient[mine.group], b[at], c[at]
    return mine.gradient, _sums(b[at], mine.group), _sums(c[at], mine.group)


def _sums(x: Tensor, group: Tensor) -> Tensor:
    """[R, D]: sums of the rows of each group, in a wider dtype."""
    wide = x.to(torch.float32 if x.element_size() == 2 else torch.float64)
    out = wide.new_zeros(int(group.max()) + 1, x.shape[1])
    return out.index_add(0, group, wide)


def _measured(
    a: Tensor, b: Tensor, c: Tensor, place: str, unit: torch.dtype, absolute: bool
) -> _Found:
    """Numbers of a run's values, the reference's and the exact ones, of one shape; in pieces, which bounds memory."""
    out = _Found(place, absolute=absolute, count=a.numel())
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    size = CHUNK if a.device.type == "cpu" else GPU_CHUNK
    each = zip(*(x.reshape(-1).split(size) for x in (a, b, c)), strict=True)
    for one, other, true in each:
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
        one, other = one.to(unit), other.to(unit)
        differs = (one != other).nonzero()[:, 0]  # NaN among them
        if len(differs):
            steps = ulps(one[differs], other[differs])
            out.ulps = max(out.ulps, int(steps.max()))
            out.unequal += len(differs)
    return out


def _most(a: float, b: Tensor) -> float:
    """The larger one; NaN stays."""
    value = float(b)
    return value if math.isnan(value) or value > a else a


def _weights(
    stage: str, run: Record, reference: Record, exact: Record, dtype: torch.dtype
) -> dict[str, list[_Found]]:
    """Numbers of the stage's weights by kind; nothing where the run has none of them."""
    names = [n for n in reference.parameters if stage_of_weight(n) == stage]
    if not any(name in run.parameters for name in names):
        return {}
    out: dict[str, list[_Found]] = {}
    for name in names:
        shape = reference.parameters[name].shape
        theirs, true = (
            parts_of_weight(name, r.parameters[name].reshape(shape)) for r in (reference, exact)
        )
        lost = name not in run.parameters
        mine = theirs if lost else parts_of_weight(name, run.parameters[name].reshape(shape))
        for kind in theirs:
            found = _measured(mine[kind], theirs[kind], true[kind], name, dtype, False)
            out.setdefault(kind, []).append(_lost(name) if lost else found)
    return out


def _hold_together(found: list[_Found], dtype: torch.dtype, share: str) -> None:
    """Errors become those of all of these weights together, as in the contract; the furthest off is first."""
    for one in found:
        one.allowed = parameter_gradient_bound(one.reference_error, half=_half(dtype), share=share)
    found.sort(key=lambda one: one.share, reverse=True)
    total = {part: sum(getattr(f, part) for f in found) for part in ("apart", "theirs", "size")}
    for one in found:
        for part, value in total.items():
            setattr(one, part, value)
        one.allowed = parameter_gradient_bound(one.reference_error, half=_half(dtype), share=share)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def bounds_of(exact: Record, advantages: Tensor, kl_coef: float, dtype: torch.dtype) -> Bounds:
    """How far ratio, KL, loss and their gradients move, to first order, with logprobs that are 1 nat off.

    Args: `advantages`: of the samples. `dtype`: the model's.
    """
    values = {key[0]: cells for key, cells in exact.cells.items() if key[0] in TOKENS}
    ratio, kl = values["ratio"], values["kl"]
    assert values["loss"].gradient is not None and kl.gradient is not None
    steep = values["loss"].gradient.abs()
    r = _largest(ratio.values)
    return Bounds(
        {
            ("logprob", FORWARD): 1.0,
            ("logprob", BACKWARD): _largest(steep) + kl_coef,
            ("ratio", FORWARD): r,
            ("ratio", BACKWARD): r * _largest(advantages),
            ("kl", FORWARD): max(1.0, _largest(kl.gradient)),
            ("kl", BACKWARD): 1.0,
            ("loss", FORWARD): float(steep.sum()),
            ("loss", BACKWARD): _largest(steep) + kl_coef,
        },
        dtype,
    )
