"""Samples to micro-batches ("bins") to ranks. Bins obey budgets of packed rows, vision patches and
samples at once. arrange.py fills them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmpack.errors import ArgumentError, PlanError, SchemaError, check_number, kind_of
from mmpack.families import FAMILIES, Family
from mmpack.planning.arrange import Arranged, SharedPrefixes, TooFew, Unit, Work, media_patches
from mmpack.planning.cost import Cost, cost_model, layout_cost, plain_layout, sharing_of
from mmpack.planning.memory import largest_pack
from mmpack.schema.error_text import safe_repr
from mmpack.schema.rules import Problem, packing_problems, problems_of
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
    `cost`: callable (rows, pairs, patches) -> float, by default `cost_model` of the samples' family.
    `model`, `memory`: a model's config (or its dict) and the bytes that weights, gradients and optimizer leave free:
    the stats then say how many rows a pack may have with gradient checkpointing, and how many more without
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
    family = _family(samples)
    sharing = sharing_of(share_prefix, family, "plan")
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
    work = Work(
        samples,
        (
            max_tokens,
            sum(samples[i].num_patches for i in kept) if max_patches is None else max_patches,
            max(len(samples), 1) if max_samples is None else max_samples,
        ),
        SharedPrefixes(samples, kept) if sharing else None,
        cost_model(family) if cost is None else cost,
        auto=sharing == "auto",
        time=layout_cost(family),
    )
    groups: dict[str, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id, []).append(i)
    found = work.arranged(list(groups.values()), ranks)
    if sharing == "auto":
        plain = replace(work, shared=None).arranged(list(groups.values()), ranks)
        fitting = [a for a in (found, plain) if isinstance(a, Arranged)]
        # the first of equals shares
        found = min(fitting, key=lambda a: a.time, default=found)
    if isinstance(found, TooFew):
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
    fix = "what weights, gradients and optimizer leave free, in bytes"
    check_number("plan", "memory", memory, least=0, fix=f"pass {fix}")
    kept, _ = _sort_out(samples, sys.maxsize, max_patches, on_invalid)
    shares = _shares(samples, kept, share)
    rows, more = (largest_pack(model, memory, *shares, grad=grad) for grad in (True, False))
    if not rows:
        raise PlanError(f"plan: {memory:,} bytes take no pack of this model. Fix: pass {fix}")
    return {"max_tokens_grad": rows, "max_tokens_no_grad": more, "no_grad_ratio": more / rows}


def _shares(samples: list[Sample], kept: list[int], share: bool) -> list[float]:
    """Loss tokens, patches, gathered keys and vision tokens a row, each of the group (sample) that has most."""
    shared = SharedPrefixes(samples, kept) if share else None
    groups: dict[Any, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id if share else i, []).append(i)
    most = [0.0] * 4
    for members in groups.values():
        chosen = [samples[i] for i in members]
        layout = shared.layout(members) if shared else plain_layout([len(s) for s in chosen])
        media = {k: v for s in chosen for k, v in media_patches(s).items()}
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
    broken = [list(problems_of(s)) + packing_problems(s) for s in samples]
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


def _stats(
    samples: list[Sample],
    bins: list[Unit],
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
