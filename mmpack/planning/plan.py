"""Samples to micro-batches ("bins") to ranks. Bins obey budgets of packed rows, vision patches and
samples at once.

A unit is what stays in one bin: a group, or a piece of a group that no bin takes whole. Indices are
those of `samples`.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmpack.errors import ArgumentError, PlanError, SchemaError, check_number, kind_of
from mmpack.families import FAMILIES, Family
from mmpack.layout.forest import build_forest
from mmpack.planning.balance import balance
from mmpack.planning.bfd import best_fit_decreasing, spread
from mmpack.planning.cost import (
    Cost,
    CostModel,
    Layout,
    LayoutCost,
    plain_layout,
    shared_layout,
    sharing_of,
)
from mmpack.planning.memory import largest_pack
from mmpack.schema.error_text import safe_repr
from mmpack.schema.rules import Problem, problems_of
from mmpack.schema.sample import Sample, as_samples


@dataclass(frozen=True)
class Dropped:
    """A sample that is in no bin, and why: broken rules, or a budget that it exceeds by itself (MM405)."""

    index: int
    sample_id: str
    group_id: str
    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.problems))


@dataclass(frozen=True)
class Plan:
    """Micro-batches and who runs them.

    `bins`: indices into the samples of each micro-batch, ascending; bins in order of their first
    sample. `ranks`: the bins of each rank, the costliest first; every rank has the same number, and
    no bin is empty. `total_tokens` (loss tokens) and `total_samples` count what is in the bins;
    they are the totals that `policy_loss` takes. `stats`: bins; rows_padded (each bin a rectangle),
    rows_packed, rows_shared (None without sharing); fill (rows of the packs / rows that the bins
    could hold); patches (each medium once per bin), patches_padded (once per sample); balance (cost of
    the costliest rank / mean); with `memory`, max_tokens_grad, max_tokens_no_grad and their ratio
    no_grad_ratio. `bin_rows`, `bin_patches`: of each bin, as `max_tokens` and `max_patches` count them:
    shared rows and media once. `share`: whether each bin's prefixes are shared, for `mp.pack`.
    """

    bins: list[list[int]]
    ranks: list[list[int]]
    total_tokens: int
    total_samples: int
    dropped: list[Dropped]
    stats: dict[str, int | float | None]
    bin_rows: list[int] = field(default_factory=list)
    bin_patches: list[int] = field(default_factory=list)
    share: list[bool] = field(default_factory=list)

    def __repr__(self) -> str:
        parts = {
            "bins": safe_repr(lambda: str(len(self.bins))),
            "ranks": safe_repr(lambda: str(len(self.ranks))),
            "samples": safe_repr(lambda: str(self.total_samples)),
            "loss_tokens": safe_repr(lambda: str(self.total_tokens)),
            "dropped": safe_repr(lambda: str(len(self.dropped))),
            "fill": safe_repr(lambda: f"{self.stats['fill']:.3f}"),
            "balance": safe_repr(lambda: f"{self.stats['balance']:.3f}"),
        }
        return f"Plan({', '.join(f'{name}={text}' for name, text in parts.items())})"


def plan(
    samples: Sequence[Sample],
    *,
    max_tokens: int | None = None,
    max_patches: int | None = None,
    max_samples: int | None = None,
    ranks: int = 1,
    share_prefix: bool | str = False,
    on_invalid: str = "raise",
    cost: Cost | None = None,
    model: Any = None,
    memory: int | None = None,
) -> Plan:
    """Groups to as few bins as best-fit-decreasing finds, bins to ranks. Same samples, same plan.

    A group stays whole if one bin takes it; otherwise it is split into as few pieces as
    best-fit-decreasing finds. With `ranks` > 1 the number of bins is the next multiple of it (ranks
    that run unequal numbers of micro-batches wait for each other forever under FSDP), and units
    are spread so that bins cost the same; groups are split for that only where there are fewer
    units than bins.

    Args: `max_tokens`: packed rows of a bin (before `pad_to_multiple_of`); by default what `memory`
    takes with gradients. `share_prefix`: a unit counts the rows of its prefix forest; "auto" plans both
    ways and takes the faster by `LayoutCost`, in which bins share only where that pays or where their
    rows don't fit otherwise: `mp.pack(…, share_prefix=plan.share[b])`. `max_patches`: vision patches
    before merging, each distinct medium (by cache key) once per bin. `max_samples`: samples of a bin. `on_invalid`:
    "raise", or "drop": `Plan.dropped` lists samples that break a rule or exceed a budget by themselves.
    `cost`: callable (rows, pairs, patches) -> float, by default `CostModel()`. `model`, `memory`: a
    model's config (or its dict) and the bytes that weights, gradients and optimizer leave free: the
    stats then say how many rows a pack may have with gradient checkpointing, and how many more without
    gradients, as old and reference logprobs run (`planning.memory`; of the group that takes most).

    Raises SchemaError with every broken rule; PlanError for a sample that exceeds a budget by itself
    (MM405), for samples of two families (MM406), and where the kept samples can't give each rank
    equally many bins (a multiple of `ranks` samples always can); ArgumentError.

    Example: two groups of two samples, 3 tokens each.
        >>> import mmpack as mp
        >>> text = {"schema_version": "1", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> text |= {"input_ids": [5, 6, 7], "loss_spans": [{"start": 2, "stop": 3, "kind": "response"}]}
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"group_id": group, "sample_id": f"{group}/{k}"})
        ...     for group in ("p", "q")
        ...     for k in range(2)
        ... ]
        >>> plan = mp.plan(samples, max_tokens=8, ranks=2)
        >>> plan.bins, plan.ranks, plan.total_tokens
        ([[0, 1], [2, 3]], [[0], [1]], 4)
    """
    samples = as_samples(samples, "plan")
    sharing = sharing_of(share_prefix, _family(samples), "plan")
    room = _room(samples, model, memory, max_patches, bool(sharing), on_invalid)
    if max_tokens is None:
        if not room:
            raise ArgumentError(
                "plan: max_tokens is None. Fix: pass packed rows of a bin, or model and memory to take them from"
            )
        max_tokens = int(room["max_tokens_grad"] or 0)
    _check_arguments(max_tokens, max_patches, max_samples, ranks, on_invalid)
    if not (cost is None or callable(cost)):
        raise ArgumentError(
            f"plan: cost is {kind_of(cost)}, expected a function of rows, pairs and patches. "
            "Fix: pass one, or None"
        )
    kept, dropped = _sort_out(samples, max_tokens, max_patches, on_invalid)
    work = _Work(
        samples,
        (
            max_tokens,
            sum(samples[i].num_patches for i in kept) if max_patches is None else max_patches,
            max(len(samples), 1) if max_samples is None else max_samples,
        ),
        _Shared(samples, kept) if sharing else None,
        CostModel() if cost is None else cost,
        auto=sharing == "auto",
    )
    groups: dict[str, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id, []).append(i)
    found = work.arranged(list(groups.values()), ranks)
    if sharing == "auto":
        plain = replace(work, shared=None).arranged(list(groups.values()), ranks)
        fitting = [a for a in (found, plain) if isinstance(a, _Arranged)]
        # the first of equals shares
        found = min(fitting, key=lambda a: a.time, default=found)
    if isinstance(found, _TooFew):
        raise found.error(ranks)
    bins, ranked, costs = found.bins, found.ranks, found.costs
    return Plan(
        bins=[u.members for u in bins],
        ranks=[sorted(r, key=lambda b: (-costs[b], b)) for r in ranked],
        total_tokens=sum(samples[i].num_loss_tokens for i in kept),
        total_samples=len(kept),
        dropped=dropped,
        stats=_stats(samples, bins, bool(sharing), max_tokens, costs, ranked) | room,
        bin_rows=[u.rows for u in bins],
        bin_patches=[u.patches for u in bins],
        share=[u.share for u in bins],
    )


@dataclass(frozen=True)
class _Unit:
    """Samples and what they take together, in a layout of planning/cost.py; patches by cache key."""

    members: list[int]
    layout: Layout
    media: dict[str, int]
    share: bool

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def patches(self) -> int:
        return sum(self.media.values())


class _TooFew(NamedTuple):
    """Why no bins were found: `samples` can't make `wanted`."""

    samples: int
    wanted: int

    def error(self, ranks: int) -> PlanError:
        return PlanError(
            f"plan: {self.samples} samples can't make {self.wanted} micro-batches, the next "
            f"multiple of {ranks} ranks within the budgets. Fix: pass a multiple of {ranks} "
            "samples, which is always enough"
        )


class _Arranged(NamedTuple):
    bins: list[_Unit]
    ranks: list[list[int]]  # bins of each
    costs: list[float]  # of each bin
    time: float  # of the slowest rank, by `LayoutCost`


class _Shared:
    """The prefix forest of all samples, built once: that of some of them is made of the segments on their paths."""

    def __init__(self, samples: list[Sample], kept: list[int]):
        forest = build_forest([samples[i] for i in kept])
        start = forest.segment_depth
        stop = start + np.diff(forest.segment_offsets)
        self.start: list[int] = start.tolist()  # depths, of each segment
        self.stop: list[int] = stop.tolist()
        self.parent: list[int] = forest.segment_parent.tolist()
        self.path = {i: forest.path(k) for k, i in enumerate(kept)}

    def rows(self, segment: int) -> int:
        return self.stop[segment] - self.start[segment]

    def layout(self, members: list[int]) -> Layout:
        segments = {g for i in members for g in self.path[i]}
        above = {self.parent[g] for g in segments}
        return shared_layout(
            [self.start[g] for g in segments],
            [self.stop[g] for g in segments],
            [g not in above for g in segments],
        )


@dataclass(frozen=True)
class _Work:
    """Measures units, splits groups, fills bins. `capacity`: rows, patches, samples of a bin."""

    samples: list[Sample]
    capacity: tuple[int, int, int]
    shared: _Shared | None
    cost: Cost
    auto: bool = False

    def arranged(self, groups: list[list[int]], ranks: int) -> _Arranged | _TooFew:
        """Groups to bins, bins to ranks."""
        units = [piece for members in groups for piece in self.pieces(members)]
        found = self.bins(units, ranks)
        if isinstance(found, _TooFew):
            return found
        bins = sorted(sorted(i for u in b for i in u.members) for b in found)
        measured = [self.laid_out(b) for b in bins]
        costs = [self.cost_of(u) for u in measured]
        ranked = balance(costs, ranks, equal_counts=True)
        times = [LayoutCost()(u.layout, u.patches) for u in measured]
        slowest = max((sum(times[b] for b in rank) for rank in ranked), default=0.0)
        return _Arranged(measured, ranked, costs, slowest)

    def unit(self, members: list[int]) -> _Unit:
        chosen = [self.samples[i] for i in members]
        media = {k: v for s in chosen for k, v in _patches(s).items()}
        if self.shared is not None:
            return _Unit(members, self.shared.layout(members), media, True)
        return _Unit(members, plain_layout([len(s) for s in chosen]), media, False)

    def laid_out(self, members: list[int]) -> _Unit:
        """A bin. With `auto` it is plain where sharing does not pay and its rows fit."""
        bin = self.unit(members)
        if not (self.auto and bin.share):
            return bin
        plain = plain_layout([len(self.samples[i]) for i in members])
        if plain.rows > self.capacity[0] or LayoutCost().sharing_pays(plain, bin.layout):
            return bin
        return replace(bin, layout=plain, share=False)

    def cost_of(self, unit: _Unit) -> float:
        rows, pairs, _ = unit.layout
        cost = self.cost(rows, pairs, unit.patches)
        where = f"cost({rows}, {pairs}, {unit.patches})"
        check_number(
            "plan", where, cost, least=0, fix="return what a micro-batch takes, in any unit"
        )
        return float(cost)

    def pieces(self, group: list[int]) -> list[_Unit]:
        """The group in one unit if a bin takes it, else in as few as best-fit-decreasing finds."""
        whole = self.unit(group)
        if all(np.array([whole.rows, whole.patches, len(group)]) <= self.capacity):
            return [whole]
        chosen = [self.samples[i] for i in group]
        media = [_patches(s) for s in chosen]
        sizes = np.array([(len(s), sum(m.values()), 1) for s, m in zip(chosen, media, strict=True)])
        parts = [[(key, 1, patches) for key, patches in m.items()] for m in media]
        if self.shared is not None:
            for i, part in zip(group, parts, strict=True):
                part += [(f"segment {g}", 0, self.shared.rows(g)) for g in self.shared.path[i]]
        bins = best_fit_decreasing(sizes, self.capacity, parts)
        return [self.unit(sorted(group[i] for i in b)) for b in bins]

    def bins(self, units: list[_Unit], ranks: int) -> list[list[_Unit]] | _TooFew:
        """Bins of units, a multiple of `ranks`."""
        sizes = np.array([(u.rows, u.patches, len(u.members)) for u in units]).reshape(-1, 3)
        parts = [[(key, 1, patches) for key, patches in u.media.items()] for u in units]
        if (sizes.sum(axis=0)[1:] <= self.capacity[1:]).all():  # only rows can bind
            packed = best_fit_decreasing(sizes[:, 0], self.capacity[0])
        else:
            packed = best_fit_decreasing(sizes, self.capacity, parts)
        wanted = -(-len(packed) // ranks) * ranks
        if ranks == 1 or not units:
            return [[units[i] for i in b] for b in packed]
        loads = np.array([self.cost_of(u) for u in units])
        if len(units) < wanted:
            halved = _halve(units, wanted, self.cost_of, self._halves)
            if len(halved) < wanted:
                return _TooFew(len(halved), wanted)
            return [[u] for u in halved]
        even = spread(sizes, self.capacity, loads, wanted, parts)
        if even is None or not all(even):
            even = _halve(
                packed,
                wanted,
                lambda b: float(loads[b].sum()),
                lambda b: [[b[i] for i in half] for half in _two(loads[b])],
            )
        return [[units[i] for i in b] for b in even]

    def _halves(self, unit: _Unit) -> list[_Unit]:
        halves = _two([self.cost_of(self.unit([i])) for i in unit.members])
        return [self.unit([unit.members[i] for i in half]) for half in halves]


def _two(loads: Sequence[float] | np.ndarray) -> list[list[int]]:
    """Indices in two halves of like load, none of them empty; a single index stays one."""
    return balance(loads, 2, equal_counts=True) if len(loads) > 1 else [[0]]


_Piece = TypeVar("_Piece")


def _halve(
    pieces: list[_Piece],
    wanted: int,
    load: Callable[[_Piece], float],
    halves: Callable[[_Piece], list[_Piece]],
) -> list[_Piece]:
    """Halve the costliest piece until there are as many as `wanted`, or none can be halved."""
    heap = [(-load(p), i, p) for i, p in enumerate(pieces)]
    heapq.heapify(heap)
    whole: list[_Piece] = []
    count = len(pieces)
    while heap and len(heap) + len(whole) < wanted:
        piece = heapq.heappop(heap)[2]
        two = halves(piece)
        if len(two) < 2:
            whole.append(piece)
            continue
        for half in two:
            heapq.heappush(heap, (-load(half), count, half))
            count += 1
    return whole + [p for _, _, p in heap]


def _family(samples: list[Sample]) -> Family | None:
    """Of the first sample that has one."""
    names = (s.family for s in samples if isinstance(s.family, str))
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def _room(
    samples: list[Sample],
    model: Any,
    memory: int | None,
    max_patches: int | None,
    share: bool,
    on_invalid: str,
) -> dict[str, int | float | None]:
    """How many rows a pack may have in `memory` bytes, with gradients and without; nothing if not asked for."""
    if (model is None) != (memory is None):
        raise ArgumentError(
            f"plan: {'model' if model is None else 'memory'} is missing. Fix: pass model and memory, or neither"
        )
    if memory is None:
        return {}
    kept, _ = _sort_out(samples, sys.maxsize, max_patches, on_invalid)
    shares = _shares(samples, kept, share)
    rows, more = (largest_pack(model, memory, *shares, grad=grad) for grad in (True, False))
    if not rows:
        raise PlanError(
            f"plan: {memory:,} bytes take no pack of this model. Fix: pass what weights, gradients and optimizer "
            "leave free, in bytes"
        )
    return {"max_tokens_grad": rows, "max_tokens_no_grad": more, "no_grad_ratio": more / rows}


def _shares(samples: list[Sample], kept: list[int], share: bool) -> list[float]:
    """Loss tokens, patches, gathered keys and vision tokens a row, each of the group (sample) that has most."""
    shared = _Shared(samples, kept) if share else None
    groups: dict[Any, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id if share else i, []).append(i)
    most = [0.0] * 4
    for members in groups.values():
        chosen = [samples[i] for i in members]
        layout = shared.layout(members) if shared else plain_layout([len(s) for s in chosen])
        media = {k: v for s in chosen for k, v in _patches(s).items()}
        vision = max(sum(m.num_tokens for m in s.media) for s in chosen)
        found = (sum(s.num_loss_tokens for s in chosen), sum(media.values()), layout.keys, vision)
        most = [max(m, f / max(layout.rows, 1)) for m, f in zip(most, found, strict=True)]
    return most


def _check_arguments(
    max_tokens: int,
    max_patches: int | None,
    max_samples: int | None,
    ranks: int,
    on_invalid: str,
) -> None:
    named = {"max_tokens": max_tokens, "max_samples": max_samples, "ranks": ranks}
    for name, value in named.items():
        if value is not None or name != "max_samples":
            check_number("plan", name, value, least=1)
    if max_patches is not None:
        check_number("plan", "max_patches", max_patches, least=0)
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f'plan: on_invalid is {on_invalid!r}. Fix: pass "raise" or "drop"')


def _sort_out(
    samples: list[Sample], max_tokens: int, max_patches: int | None, on_invalid: str
) -> tuple[list[int], list[Dropped]]:
    """Indices of the samples that keep every rule and fit into a bin by themselves, and the others."""
    broken = [list(problems_of(s)) for s in samples]
    if on_invalid == "raise" and any(broken):
        raise SchemaError([p for problems in broken for p in problems], "plan")
    kept, dropped = [], []
    for i, (sample, problems) in enumerate(zip(samples, broken, strict=True)):
        problems = problems or _excess(sample, max_tokens, max_patches)
        if problems and on_invalid == "raise":
            raise PlanError(f"plan: samples[{i}] {problems[0]}")
        if problems:
            dropped.append(Dropped(i, sample.sample_id, sample.group_id, tuple(problems)))
        else:
            kept.append(i)
    families = {samples[i].family: i for i in reversed(kept)}
    if len(families) > 1:
        (a, i), (b, j) = sorted(families.items(), key=lambda item: item[1])[:2]
        raise PlanError(
            f"plan: samples[{i}] is of family {a}, samples[{j}] of {b} (MM406). "
            "Fix: plan each family by itself"
        )
    return kept, dropped


def _excess(sample: Sample, max_tokens: int, max_patches: int | None) -> list[Problem]:
    out = []
    if len(sample) > max_tokens:
        message = f"has {len(sample)} tokens, max_tokens is {max_tokens}"
        out.append(Problem("MM405", sample.sample_id, "input_ids", message))
    if max_patches is not None and sample.num_patches > max_patches:
        message = f"has {sample.num_patches} patches, max_patches is {max_patches}"
        out.append(Problem("MM405", sample.sample_id, "media", message))
    return out


def _patches(sample: Sample) -> dict[str, int]:
    """Patches of each distinct medium, by cache key."""
    return {m.cache_key: m.num_patches for m in sample.media}


def _stats(
    samples: list[Sample],
    bins: list[_Unit],
    share: bool,
    max_tokens: int,
    costs: list[float],
    ranks: list[list[int]],
) -> dict[str, int | float | None]:
    lengths = [[len(samples[i]) for i in u.members] for u in bins]
    rows = sum(u.rows for u in bins)
    loads = [sum(costs[b] for b in rank) for rank in ranks]
    return {
        "bins": len(bins),
        "rows_padded": sum(len(n) * max(n) for n in lengths),
        "rows_packed": sum(map(sum, lengths)),
        "rows_shared": rows if share else None,
        "fill": rows / (len(bins) * max_tokens) if bins else 0.0,
        "patches": sum(u.patches for u in bins),
        "patches_padded": sum(samples[i].num_patches for u in bins for i in u.members),
        "balance": max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0,
    }
