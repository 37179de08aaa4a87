"""Which groups of tokens drift more than the others, and by which axis that is told best.

y of a token is log |d|. A contrast gives each group of an axis a number x, and y is fitted by a + b x. Errors of b are
those of samples drawn anew, since tokens of one sample move together (Liang and Zeger 1986, the sandwich estimator).
The best contrast is taken, all that its axis tells is taken out of y, and the next is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.contracts import TOLERANCES
from mmpack.parity.drift_tokens import Axis

TIMES = 1.5  # drift counts as larger from here on
SIGMAS = 5.0  # by so many standard errors
FEW_TOKENS, FEW_SAMPLES = 64, 4  # fewer on a side tell nothing
LIKE = 0.98  # a contrast that explains this part of the best one is as good
MOST = 3  # contrasts taken
# of contrasts that are as good, the first
ORDER = ("medium", "modality", "turn", "version", "position", "response", "length")


@dataclass(frozen=True)
class Table:
    """One axis: `count` and `size` (the sum of y) of each sample and group, float64 [S, G].

    `code` int64 [R]: the group of each run; `owner` int64 [R]: its sample; `tokens` [R].
    """

    axis: Axis
    owner: np.ndarray
    code: np.ndarray
    tokens: np.ndarray
    count: np.ndarray
    size: np.ndarray

    @classmethod
    def of(
        cls, axis: Axis, owner: np.ndarray, code: np.ndarray, tokens: np.ndarray, size: np.ndarray
    ) -> Table:
        empty = np.zeros((0, 0))
        made = cls(axis, owner, code, tokens, empty, empty)
        return replace(made, count=made.added(tokens), size=made.added(size))

    def added(self, values: np.ndarray) -> np.ndarray:
        """Values of runs [R], added up by sample and group."""
        shape = int(self.owner[-1]) + 1, len(self.axis.names)
        cells = self.owner * shape[1] + self.code
        return np.bincount(cells, values, shape[0] * shape[1]).reshape(shape)


@dataclass(frozen=True)
class Contrast:
    """`kind`: `alone` (one group), `from` (that group and later), `before` (earlier ones), `grows`, `falls`, or a name.

    `groups`: those on the high side. `times`: how much larger |d| is there (geometric
    means), `error` the standard error of its logarithm. `low`, `high`: mean |d|.
    """

    axis: str
    kind: str
    groups: tuple[int, ...]
    x: np.ndarray
    names: tuple[str, ...]
    times: float = 0.0
    error: float = 0.0
    explains: float = 0.0
    low: float = 0.0
    high: float = 0.0


def comparable(table: Table) -> bool:
    """Whether two groups at least have tokens and samples enough to be compared."""
    known = np.arange(len(table.axis.names)) != (
        -1 if table.axis.loose is None else table.axis.loose
    )
    enough = (table.count.sum(axis=0) >= FEW_TOKENS) & (
        (table.count > 0).sum(axis=0) >= FEW_SAMPLES
    )
    return int((enough & known).sum()) > 1


@dataclass(frozen=True)
class Found:
    """`best`, those as good, and the axes that stand out only as far as it explains them."""

    best: Contrast
    as_good: tuple[Contrast, ...]
    follows: tuple[str, ...] = ()


def told_apart(tables: Mapping[str, Table], moved: np.ndarray) -> list[Found]:
    """At most MOST, the strongest first. `moved`: the sum of |d| of each run [R]."""
    usable = {name: contrasts(name, table.axis) for name, table in tables.items()}
    alone = {n for n in tables if _fits(tables[n], usable[n], moved)}
    out: list[Found] = []
    left, told = dict(tables), set[str]()
    while len(out) < MOST:
        fits = [c for n in ORDER if n in left for c in _fits(left[n], usable[n], moved)]
        if not fits:
            break
        top = max(c.explains for c in fits)
        as_good: dict[str, Contrast] = {}
        for c in sorted(fits, key=lambda c: -round(c.explains / top, 9)):
            if c.explains >= LIKE * top:
                as_good.setdefault(c.axis, c)
        best, *others = (as_good[name] for name in ORDER if name in as_good)
        out.append(Found(best, tuple(others)))
        told |= as_good.keys()
        left = _without(left, best.axis, told)
    if out:
        out[0] = replace(out[0], follows=tuple(n for n in ORDER if n in alone - told))
    return out


def contrasts(name: str, axis: Axis) -> list[Contrast]:
    """Contrasts that an axis may show; groups of which nothing is known take no part: NaN."""
    count = len(axis.names)
    known = [g for g in range(count) if g != axis.loose]
    sets: list[tuple[str, list[int]]] = []
    if name == "medium":
        # of two that come to the same tokens, the first is said
        sets = [("image", [2, 3]), ("video", [4, 5]), ("audio", [6, 7])]
        sets += [("after", [2, 3, 4, 5, 6, 7]), ("near image", [2]), ("near video", [4])]
        sets += [("near audio", [6]), ("near", [2, 4, 6]), ("before", [1])]
    elif name == "modality":
        sets = [("both", [3, 7]), ("image", [1, 3, 5, 7]), ("video", [2, 3, 6, 7])]
        sets += [("audio", [4, 5, 6, 7]), ("media", [1, 2, 3, 4, 5, 6, 7]), ("text", [0])]
    elif axis.ordered:
        sets = [("from", known[g:]) for g in range(1, len(known))]
        sets += [("before", known[:g]) for g in range(1, len(known))]
        sets += [("alone", [g]) for g in known[1:-1]]
    elif len(known) > 1:
        sets = [("alone", [g]) for g in known]
    out = []
    for kind, groups in sets:
        x = np.isin(np.arange(count), groups).astype(np.float64)
        out.append(Contrast(name, kind, tuple(groups), _known(x, axis), axis.names))
    if axis.ordered and len(known) > 2 and name in ("position", "response", "length"):
        rising = np.linspace(0.0, 1.0, count)
        out.append(Contrast(name, "grows", (count - 1,), rising, axis.names))
        out.append(Contrast(name, "falls", (0,), 1 - rising, axis.names))
    return out


def _known(x: np.ndarray, axis: Axis) -> np.ndarray:
    if axis.loose is not None:
        x[axis.loose] = np.nan
    return x


def _fits(table: Table, usable: list[Contrast], moved: np.ndarray) -> list[Contrast]:
    """The contrasts whose high side surely drifts more."""
    if not usable or len(table.count) < 2 * FEW_SAMPLES:
        return []
    x: Any = np.stack([c.x for c in usable], axis=1)
    known = np.isfinite(x[:, 0])
    x, count, size = x[known], table.count[:, known], table.size[:, known]
    of_group, total = count.sum(axis=0), count.sum()
    if not total:
        return []
    high, low = x == 1, x == 0
    tokens = np.minimum(of_group @ high, of_group @ low)
    there = (count > 0).astype(np.float64)
    samples = np.minimum(*(((there @ side) > 0).sum(axis=0) for side in (high, low)))
    mean = size.sum() / total
    x = x - (of_group @ x) / total
    spread = of_group @ x**2
    enough = (tokens >= FEW_TOKENS) & (samples >= FEW_SAMPLES) & (spread > 0)
    covered = (size.sum(axis=0) - mean * of_group) @ x
    b = covered / np.where(spread > 0, spread, 1)
    scores = size @ x - mean * (count @ x) - b * (count @ x**2)
    drawn = (count.sum(axis=1) > 0).sum()
    drawn_anew = np.square(scores).sum(axis=0) * drawn / max(drawn - 1, 1)
    error = np.sqrt(drawn_anew) / np.where(spread > 0, spread, 1)
    sure = SIGMAS * (1 + FEW_SAMPLES / np.maximum(samples - 1, 1))  # few samples: errors are unsure
    stands = enough & (b >= np.log(TIMES)) & (b > sure * error)
    by_group = table.added(moved)[:, known].sum(axis=0)
    out = []
    for k in np.flatnonzero(stands).tolist():
        means = [float(by_group @ side[:, k] / (of_group @ side[:, k])) for side in (low, high)]
        if means[1] <= TOLERANCES["engines_mean"].value:
            continue  # as two engines in fp32 differ: no drift
        told = replace(
            usable[k],
            times=float(np.exp(b[k])),
            error=float(error[k]),
            explains=float(covered[k] ** 2 / spread[k]),
            low=means[0],
            high=means[1],
        )
        out.append(told)
    return out


def _without(tables: Mapping[str, Table], name: str, told: set[str]) -> dict[str, Table]:
    """The tables of all other axes, of y less its mean in each group of axis `name`."""
    by = tables[name]
    mean = by.size.sum(axis=0) / np.maximum(by.count.sum(axis=0), 1)
    taken = mean[by.code] * by.tokens
    return {
        key: replace(table, size=table.size - table.added(taken))
        for key, table in tables.items()
        if key not in told
    }
