"""What a plan's micro-batches and ranks take, how even they are, and what splitting groups costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmpack.planning.arrange import TAKEN, Arranged, Unit, Work
from mmpack.planning.counts import NOTHING, Counts, summed

# the types that a saved plan's figures have
STATS: dict[str, Any] = (
    dict.fromkeys(
        ("bins", "idle_bins", "rows_padded", "rows_packed", "patches", "patches_padded"), int
    )
    | dict.fromkeys(
        ("rows_repeated", "patches_repeated", "max_tokens_grad", "max_tokens_no_grad"), int
    )
    | dict.fromkeys(
        ("fill", "makespan", "makespan_whole", "balance", "lockstep", "media_balance"), float
    )
    | dict.fromkeys(("repeat_cost", "no_grad_ratio"), float)
    | dict.fromkeys(("seconds", "seconds_error"), float | None)
    | {"rows_shared": int | None, "fills": dict[str, float], "loads": list[float]}
)


def stats_of(found: Arranged, work: Work) -> dict[str, Any]:
    """`Plan.stats`.

    `bins`; `idle_bins`, which are empty, as there are fewer samples; `rows_padded` (each bin a rectangle),
    `rows_packed`, `rows_shared` (None without sharing). `fill`: rows of the packs over those that bins with samples
    could hold; `fills`: the same of each budget that was given. `patches` (each medium once per bin),
    `patches_padded` (once per sample).

    `loads`: cost of each rank; `makespan`: of the costliest, and `balance`: that over the mean. `lockstep`: the sum
    over the ranks' first, second, … bins of the costliest one, over the mean load: ranks that meet in every bin, as
    under FSDP, take that long. `media_balance`: patches of the rank with most, over the mean. `makespan_whole`: what
    the makespan would be if no group were split that a bin takes. `rows_repeated`, `patches_repeated`: because groups
    are split; `repeat_cost`: seconds of it over those of all bins.

    `seconds`: of the slowest rank, as predicted; None where the cost is not calibrated. `seconds_error`: the
    calibration's mean relative error.
    """
    samples, time = work.samples, work.time
    bins, ranks, costs = found.bins, found.ranks, found.costs
    lengths = [[len(samples[i]) for i in u.members] for u in bins if u.members]
    rows = sum(u.rows for u in bins)
    loads = [sum(costs[b] for b in rank) for rank in ranks]
    patches = [sum(bins[b].patches for b in rank) for rank in ranks]
    repeated = _repeated(bins, work)
    seconds = [time.seconds(u.counts) for u in bins]
    places = zip(*(sorted((costs[b] for b in rank), reverse=True) for rank in ranks), strict=True)
    return {
        "bins": len(bins),
        "idle_bins": len(bins) - len(lengths),
        "rows_padded": sum(len(n) * max(n) for n in lengths),
        "rows_packed": sum(map(sum, lengths)),
        "rows_shared": rows if work.shared is not None or work.auto else None,
        "fill": rows / (len(lengths) * work.budgets.max_tokens) if lengths else 0.0,
        "fills": _fills([u for u in bins if u.members], work),
        "patches": sum(patches),
        "patches_padded": sum(samples[i].num_patches for u in bins for i in u.members),
        "loads": loads,
        "makespan": max(loads, default=0.0),
        "makespan_whole": found.makespan_whole,
        "balance": _over_mean(loads),
        "lockstep": sum(map(max, places)) * len(loads) / sum(loads) if sum(loads) else 1.0,
        "media_balance": _over_mean(patches),
        "rows_repeated": repeated.rows,
        "patches_repeated": repeated.patches,
        "repeat_cost": time.seconds(repeated) / sum(seconds) if sum(seconds) else 0.0,
        "seconds": found.time if time.calibrated else None,
        "seconds_error": time.error,
    }


def _over_mean(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _fills(bins: list[Unit], work: Work) -> dict[str, float]:
    """What all bins take of each budget that was given."""
    given = {name: getattr(work.budgets, name) for name in TAKEN}
    return {
        name: sum(map(TAKEN[name], bins)) / (len(bins) * most) if bins else 0.0
        for name, most in given.items()
        if most
    }


def _repeated(bins: list[Unit], work: Work) -> Counts:
    """What groups in several bins take there beyond what they would in one: rows, their pairs, media."""
    homes: dict[str, dict[int, list[int]]] = {}
    for b, unit in enumerate(bins):
        for i in unit.members:
            homes.setdefault(work.samples[i].group_id, {}).setdefault(b, []).append(i)
    more = [NOTHING]
    for pieces in homes.values():
        if len(pieces) < 2:
            continue
        shares = any(bins[b].share for b in pieces)
        measure = work if shares else replace(work, shared=None)
        whole = measure.unit(sorted(i for piece in pieces.values() for i in piece)).counts
        split = summed(measure.unit(piece).counts for piece in pieces.values())
        more.append(Counts(*(b - a for a, b in zip(whole, split, strict=True))))
    return summed(more)._replace(keys=0, waves=0, batches=0)
