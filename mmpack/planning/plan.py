"""Samples to micro-batches ("bins") to ranks. Bins obey all budgets at once. arrange.py fills them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.families import FAMILIES, Family
from mmpack.planning.arrange import Arranged, SharedPrefixes, TooFew, Unit, Work
from mmpack.planning.budgets import Budgets
from mmpack.planning.cost import Cost, cost_model, layout_cost, sharing_of
from mmpack.planning.keep import check_age, sort_out, tail_of
from mmpack.planning.planned import Dropped, Plan, fingerprint_of
from mmpack.planning.room import check_memory, room_of
from mmpack.schema.sample import Sample, as_samples

__all__ = ["Dropped", "Plan", "plan"]


def plan(
    samples: Sequence[Sample],
    *,
    max_tokens: int | None = None,
    max_patches: int | None = None,
    max_samples: int | None = None,
    max_loss_tokens: int | None = None,
    max_media_bytes: int | None = None,
    ranks: int = 1,
    share_prefix: bool | str = False,
    on_invalid: str = "raise",
    cost: Cost | None = None,
    model: Any = None,
    memory: int | None = None,
    defer_tail: float = 0.0,
    max_policy_lag: int | None = None,
    policy_versions: Sequence[str] | None = None,
) -> Plan:
    """Groups to as few bins as best-fit-decreasing finds, bins to ranks. Same samples, same plan, in
    any order.

    A group stays whole if one bin takes it; otherwise it is split into as few pieces as
    best-fit-decreasing finds. With `ranks` > 1 the number of bins is the next multiple of it (ranks
    that run unequal numbers of micro-batches wait for each other forever under FSDP), and units
    are spread so that bins cost the same; groups are split for that only where there are fewer
    units than bins.

    Args: `max_tokens`: packed rows of a bin (before `pad_to_multiple_of`); by default what `memory`
    takes with gradients. `share_prefix`: a unit counts the rows of its prefix forest; "auto" plans both
    ways and takes the faster by `LayoutCost`, in which bins share only where that pays or where their
    rows don't fit otherwise: `mp.pack(…, share_prefix=plan.share[b])`. `max_patches`: vision patches
    before merging, each distinct medium (by cache key) once per bin. `max_samples`: samples of a bin.
    `max_loss_tokens`: loss tokens of a bin. `max_media_bytes`: bytes of a bin's pixels, each medium once (float32
    where it holds none). `on_invalid`: "raise", or "drop": `Plan.dropped` lists samples that break a rule or exceed a
    budget by themselves. `defer_tail`: the share of the groups that is left for a later plan, those with the longest
    samples: `Plan.deferred`. `max_policy_lag`: samples of which older weights wrote a token are dropped (MM409);
    `policy_versions`: all names of weights, the oldest first, unless they are numbers; the last of them, else the
    newest of the samples, is 0 behind.
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
    given = as_samples(samples, "plan")
    family = _family(given)
    sharing = sharing_of(share_prefix, family, "plan")
    _check_arguments(ranks, on_invalid, cost, defer_tail)
    age = check_age(max_policy_lag, policy_versions)
    check_memory(model, memory)
    room: dict[str, int | float | None] = {}
    if memory is not None:
        valid, _ = sort_out(given, None, age, on_invalid)
        room = room_of(given, valid, model, memory, bool(sharing))
        if max_tokens is None:
            max_tokens = int(room["max_tokens_grad"] or 0)
    if max_tokens is None:
        raise ArgumentError(
            "plan: max_tokens is None. Fix: pass packed rows of a bin, or model and memory to take them from"
        )
    budgets = Budgets(max_tokens, max_patches, max_samples, max_loss_tokens, max_media_bytes)
    budgets.check()
    kept, dropped = sort_out(given, budgets, age, on_invalid)
    deferred = tail_of(given, kept, defer_tail)
    later = set(deferred)
    # one order, whatever the caller's: the same samples make the same plan
    order = sorted((i for i in kept if i not in later), key=lambda i: _place(given[i], i))
    ordered = [given[i] for i in order]
    groups: dict[str, list[int]] = {}
    for k, sample in enumerate(ordered):
        groups.setdefault(sample.group_id, []).append(k)
    found = _arranged(ordered, list(groups.values()), budgets, ranks, sharing, cost, family)
    numbers, bins = _in_callers_order(found.bins, order)
    ranked = [[numbers[b] for b in rank] for rank in found.ranks]
    costs = [cost for _, cost in sorted(zip(numbers, found.costs, strict=True))]
    return Plan(
        bins=[u.members for u in bins],
        ranks=[sorted(r, key=lambda b: (-costs[b], b)) for r in ranked],
        total_tokens=sum(s.num_loss_tokens for s in ordered),
        total_samples=len(ordered),
        dropped=dropped,
        stats=_stats(given, bins, bool(sharing), max_tokens, costs, ranked) | room,
        bin_rows=[u.rows for u in bins],
        bin_patches=[u.patches for u in bins],
        share=[u.share for u in bins],
        deferred=deferred,
        fingerprint=fingerprint_of(given),
    )


def _arranged(
    samples: list[Sample],
    groups: list[list[int]],
    budgets: Budgets,
    ranks: int,
    sharing: bool | str,
    cost: Cost | None,
    family: Family | None,
) -> Arranged:
    """Bins and ranks; with `sharing` "auto", of both ways the one that takes less time. Raises PlanError."""
    work = Work(
        samples,
        budgets,
        SharedPrefixes(samples, list(range(len(samples)))) if sharing else None,
        cost_model(family) if cost is None else cost,
        auto=sharing == "auto",
        time=layout_cost(family),
    )
    found = work.arranged(groups, ranks)
    if sharing == "auto":
        plain = replace(work, shared=None).arranged(groups, ranks)
        fitting = [a for a in (found, plain) if isinstance(a, Arranged)]
        # the first of equals shares
        found = min(fitting, key=lambda a: a.time, default=found)
    if isinstance(found, TooFew):
        raise found.error(ranks)
    return found


def _place(sample: Sample, index: int) -> tuple[str, str, int, int]:
    return sample.group_id, sample.sample_id, len(sample), index


def _in_callers_order(bins: list[Unit], order: list[int]) -> tuple[list[int], list[Unit]]:
    """The new number of each bin, and the bins in it: members are the caller's indices, ascending."""
    named = [replace(u, members=sorted(order[k] for k in u.members)) for u in bins]
    by_first = sorted(range(len(named)), key=lambda b: named[b].members)
    numbers = [0] * len(named)
    for number, b in enumerate(by_first):
        numbers[b] = number
    return numbers, [named[b] for b in by_first]


def _family(samples: list[Sample]) -> Family | None:
    """Of the first sample that has one."""
    names = (s.family for s in samples if isinstance(s.family, str))
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def _check_arguments(ranks: int, on_invalid: str, cost: Any, defer_tail: float) -> None:
    check_number("plan", "ranks", ranks, least=1)
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f'plan: on_invalid is {on_invalid!r}. Fix: pass "raise" or "drop"')
    if not (cost is None or callable(cost)):
        raise ArgumentError(
            f"plan: cost is {kind_of(cost)}, expected a function of rows, pairs and patches. "
            "Fix: pass one, or None"
        )
    check_number(
        "plan", "defer_tail", defer_tail, least=0, fix="pass a share of the groups, below 1"
    )
    if defer_tail >= 1:
        raise ArgumentError(
            f"plan: defer_tail is {defer_tail}. Fix: pass a share of the groups, below 1"
        )


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
