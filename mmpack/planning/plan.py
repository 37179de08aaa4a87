"""Samples to micro-batches ("bins") to ranks. Bins obey all budgets at once. arrange.py fills them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmpack.errors import ArgumentError, PlanError, check_number, kind_of
from mmpack.families import FAMILIES, Family
from mmpack.planning.arrange import Arranged, Unit, Work
from mmpack.planning.budgets import Budgets, media_of
from mmpack.planning.cost import Cost, CostModel, cost_model, family_cost, sharing_of
from mmpack.planning.counts import plain_counts
from mmpack.planning.keep import check_age, sort_out, tail_of
from mmpack.planning.layer_bytes import chunks_of
from mmpack.planning.memory import largest_pack
from mmpack.planning.planned import Dropped, Plan, fingerprint_of
from mmpack.planning.prefixes import SharedPrefixes
from mmpack.planning.stats import stats_of
from mmpack.schema.sample import Sample, as_samples

__all__ = ["Dropped", "Plan", "plan"]

MAX_RANKS = 2**16
FIX = "what weights, gradients and optimizer leave free, in bytes"


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
    cost: CostModel | Cost | None = None,
    keep_groups: bool = False,
    model: Any = None,
    memory: int | None = None,
    defer_tail: float = 0.0,
    max_policy_lag: int | None = None,
    policy_versions: Sequence[str] | None = None,
) -> Plan:
    """Groups to as few bins as best-fit-decreasing finds, bins to ranks. Same samples, same plan, in
    any order.

    A group that no bin takes whole is cut where the least is repeated, by the cost of rows and media: exactly for up to
    eight samples. With `ranks` > 1 the number of bins is the next multiple of it (ranks that run unequal numbers of
    micro-batches wait for each other forever under FSDP), and units are spread so that bins cost the same. Groups
    that a bin takes stay whole, unless there are fewer of them than bins, or splitting some saves more than 1% of
    the slowest rank's cost; `keep_groups` allows the first alone. What it costs is in `Plan.stats`. Bins stay
    empty only where there are fewer samples: `idle_batch`.

    Args: `max_tokens`: packed rows of a bin (before `pad_to_multiple_of`); by default what `memory`
    takes with gradients. `share_prefix`: a unit counts the rows of its prefix forest; "auto" plans both
    ways and takes the faster by `cost`, in which bins share only where that pays or where their
    rows don't fit otherwise: `mp.pack(…, share_prefix=plan.share[b])`. `max_patches`: vision patches
    before merging, each distinct medium (by cache key) once per bin. `max_samples`: samples of a bin.
    `max_loss_tokens`: loss tokens of a bin. `max_media_bytes`: bytes of a bin's pixels, each medium once (float32
    where it holds none). `on_invalid`: "raise", or "drop": `Plan.dropped` lists samples that break a rule or exceed a
    budget by themselves. `defer_tail`: the share of the groups that is left for a later plan, those with the longest
    samples: `Plan.deferred`. `max_policy_lag`: samples of which older weights wrote a token are dropped (MM409);
    `policy_versions`: all names of weights, the oldest first, unless they are numbers; the last of them, else the
    newest of the samples, is 0 behind.
    `cost`: a `planning.CostModel`, best one that is calibrated; by default `planning.cost_model` of `model`, else that
    of a model as large as Qwen2.5-VL-7B with the family's kinds of layers. A callable (rows, pairs, patches) -> float
    (pairs: the sum of L²) balances ranks alone; what is shared and cut then goes by the default.
    `model`, `memory`: a model's config (or its dict) and the bytes that weights, gradients and optimizer leave free:
    the stats then say how many rows a pack may have with gradient checkpointing, and how many more without
    gradients, as old and reference logprobs run (`planning.memory`; of the group that takes most).

    Raises SchemaError with every broken rule; PlanError for a sample that exceeds a budget by itself
    (MM405), and for samples of two families (MM406); ArgumentError.

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
            "plan: max_tokens is None. Fix: pass the packed rows of a bin, or model and memory to derive them"
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
    default = family_cost(family) if model is None else cost_model(model)
    work = _work(ordered, budgets, sharing, cost, default, keep_groups)
    found = _arranged(work, list(groups.values()), ranks)
    numbers, bins = _in_callers_order(found.bins, order)
    ranked = [[numbers[b] for b in rank] for rank in found.ranks]
    costs = [cost for _, cost in sorted(zip(numbers, found.costs, strict=True))]
    return Plan(
        bins=[u.members for u in bins],
        ranks=[sorted(r, key=lambda b: (-costs[b], b)) for r in ranked],
        total_tokens=sum(s.num_loss_tokens for s in ordered),
        total_samples=len(ordered),
        dropped=dropped,
        stats=stats_of(found, work) | room,
        bin_rows=[u.rows for u in bins],
        bin_patches=[u.patches for u in bins],
        bin_loss_tokens=[u.loss_tokens for u in bins],
        bin_costs=costs,
        share=[u.share for u in bins],
        deferred=deferred,
        fingerprint=fingerprint_of(given),
    )


def _work(
    samples: list[Sample],
    budgets: Budgets,
    sharing: bool | str,
    cost: CostModel | Cost | None,
    default: CostModel,
    keep_groups: bool,
) -> Work:
    time = cost if isinstance(cost, CostModel) else default
    shared = SharedPrefixes(samples, list(range(len(samples))), time.spans) if sharing else None

    def price(unit: Unit) -> float:
        if cost is None or isinstance(cost, CostModel):
            return time.seconds(unit.counts)
        return _by_callers(cost, unit)

    return Work(samples, budgets, shared, price, time, sharing == "auto", keep_groups)


def _by_callers(cost: Cost, unit: Unit) -> float:
    given = unit.rows, unit.counts.squares, unit.patches
    found = cost(*given)
    where = f"cost({', '.join(map(str, given))})"
    check_number("plan", where, found, least=0, fix="return what a micro-batch takes, in any unit")
    return float(found)


def _arranged(work: Work, groups: list[list[int]], ranks: int) -> Arranged:
    """Bins and ranks; with `auto` of both ways the one that takes less time."""
    found = work.arranged(groups, ranks)
    if work.auto:
        plain = replace(work, shared=None).arranged(groups, ranks)
        # the first of equals shares
        found = min((found, plain), key=lambda a: a.time)
    return found


def _place(sample: Sample, index: int) -> tuple[str, str, int, int]:
    return sample.group_id, sample.sample_id, len(sample), index


def _in_callers_order(bins: list[Unit], order: list[int]) -> tuple[list[int], list[Unit]]:
    """The new number of each bin, and the bins in it: members are the caller's indices, ascending. Empty ones last."""
    named = [replace(u, members=sorted(order[k] for k in u.members)) for u in bins]
    by_first = sorted(range(len(named)), key=lambda b: (not named[b].members, named[b].members))
    numbers = [0] * len(named)
    for number, b in enumerate(by_first):
        numbers[b] = number
    return numbers, [named[b] for b in by_first]


def _family(samples: list[Sample]) -> Family | None:
    """Family of the first sample that has one."""
    names = (s.family for s in samples if isinstance(s.family, str))
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def _check_arguments(ranks: int, on_invalid: str, cost: Any, defer_tail: float) -> None:
    check_number("plan", "ranks", ranks, least=1, most=MAX_RANKS)
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f'plan: on_invalid is {on_invalid!r}. Fix: pass "raise" or "drop"')
    if not (cost is None or isinstance(cost, CostModel) or callable(cost)):
        raise ArgumentError(
            f"plan: cost is {kind_of(cost)}, expected a CostModel, or a function of rows, pairs and patches. "
            "Fix: pass one, or None"
        )
    check_number(
        "plan", "defer_tail", defer_tail, least=0, fix="pass a share of the groups, below 1"
    )
    if defer_tail >= 1:
        raise ArgumentError(
            f"plan: defer_tail is {defer_tail}. Fix: pass a share of the groups, below 1"
        )


def check_memory(model: Any, memory: int | None) -> None:
    """Raise ArgumentError for memory without a model, or that is no number of bytes."""
    if model is None and memory is not None:
        raise ArgumentError("plan: memory is given without model. Fix: pass both or neither")
    if memory is not None:
        check_number("plan", "memory", memory, least=0, fix=f"pass {FIX}")


def room_of(
    samples: list[Sample], kept: list[int], model: Any, memory: int, share: bool
) -> dict[str, int | float | None]:
    """How many rows a pack of `kept` may have in `memory` bytes, with gradients and without."""
    shares = _shares(samples, kept, share)
    rows, more = (largest_pack(model, memory, *shares, grad=grad) for grad in (True, False))
    if not rows:
        raise PlanError(f"plan: {memory:,} bytes take no pack of this model. Fix: pass {FIX}")
    return {"max_tokens_grad": rows, "max_tokens_no_grad": more, "no_grad_ratio": more / rows}


def _shares(samples: list[Sample], kept: list[int], share: bool) -> list[float]:
    """What a row has, each of the group (sample) that has most: loss tokens, patches, gathered keys, vision tokens;
    chunks and branches of linear attention."""
    shared = SharedPrefixes(samples, kept) if share else None
    groups: dict[Any, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id if share else i, []).append(i)
    most = [0.0] * 6
    for members in groups.values():
        chosen = [samples[i] for i in members]
        lengths = [len(s) for s in chosen]
        counts = shared.counts(members) if shared else plain_counts(lengths)
        linear = shared.linear(members) if shared else (sum(map(chunks_of, lengths)), 0)
        media = {k: m.patches for s in chosen for k, m in media_of(s).items()}
        vision = max(sum(m.num_tokens for m in s.media) for s in chosen)
        loss = sum(s.num_loss_tokens for s in chosen)
        found = (loss, sum(media.values()), counts.keys, vision, *linear)
        most = [max(m, f / max(counts.rows, 1)) for m, f in zip(most, found, strict=True)]
    return most
