"""`mmpack plan TRACE`: the micro-batches that a trace makes under given budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mmpack.cli.output import OutputFile, Result, TraceArgument, table
from mmpack.progress import tracked

SHOWN = 50  # bins, and ranks, on the screen
BAR = 20  # letters of a whole one
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_CONFIG = 2**24  # bytes


def as_bytes(text: str | None, option: str = "--memory") -> int | None:
    """`40GB`, `37.5GiB`, or a plain number of bytes."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]I?B)?", text.strip().upper())
    if found is None:
        raise typer.BadParameter(
            f"{option} {text!r:.60} is not a number of bytes, such as 40GB or 37.5GiB."
        )
    count = float(found[1]) * UNITS[found[2] or ""]
    if count > 2**53:
        raise typer.BadParameter(f"{option} {text!r:.60} is more bytes than there are.")
    return int(count)


def config_of(path: Path | None) -> dict[str, Any] | None:
    """The JSON of a config.json, or of the one in a model's folder."""
    from mmpack.schema.saved import read_json

    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file, MAX_CONFIG, finite=False)  # transformers writes Infinity
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON that can be read ({error}).") from error
    if not isinstance(config, dict):
        raise typer.BadParameter(f"{file} does not hold a JSON object.")
    return config


def command(
    trace: TraceArgument,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    max_patches: Annotated[int | None, typer.Option(min=0)] = None,
    max_samples: Annotated[int | None, typer.Option(min=1)] = None,
    max_loss_tokens: Annotated[int | None, typer.Option(min=0)] = None,
    max_media_bytes: str | None = None,
    ranks: Annotated[int, typer.Option(min=1)] = 1,
    share_prefix: bool = False,
    auto_share: bool = False,
    model: Path | None = None,
    cost: Path | None = None,
    keep_groups: bool = False,
    memory: str | None = None,
    defer_tail: Annotated[float, typer.Option(min=0)] = 0.0,
    max_policy_lag: Annotated[int | None, typer.Option(min=0)] = None,
    save: OutputFile = None,
) -> Result:
    """Plan micro-batches; show how full they are and how evenly they load the ranks.

    Args:
        max_tokens: Packed rows per micro-batch, at most. Default: as many as --memory allows.
        max_patches: Vision patches per micro-batch, at most.
        max_samples: Samples per micro-batch, at most.
        max_loss_tokens: Loss tokens per micro-batch, at most.
        max_media_bytes [BYTES]: Bytes of pixels per micro-batch, at most, such as 2GB; each medium counts once.
        ranks: Ranks that share the micro-batches.
        share_prefix: Count rows of a shared prefix once.
        auto_share: Share prefixes only in micro-batches where that takes less time.
        model [CONFIG]: A model's config.json or its folder, for its cost and for --memory.
        cost [FILE]: A cost file that `mmpack.planning.calibrate` saved.
        keep_groups: Never split a group that fits one micro-batch just for balance.
        memory [BYTES]: Memory that weights, gradients and optimizer leave free (40GB, 37.5GiB). Shows how many rows
            a pack may have with gradients, and without them, as for old and reference logprobs.
        defer_tail: Share of the groups, those with the longest samples, to leave for a later plan.
        max_policy_lag: Leave out samples with a token whose weights are more versions behind.
        save [FILE]: Write the plan here, for Plan.load.

    Examples:
        mmpack plan train.jsonl --max-tokens 4096 --share-prefix --ranks 2 --save plan.json
        mmpack plan train.jsonl --model config.json --memory 40GB --auto-share
    """
    from mmpack.planning.cost import CostModel
    from mmpack.planning.plan import plan
    from mmpack.schema.trace import read_trace

    free, config = as_bytes(memory), config_of(model)
    if free is not None and config is None:
        raise typer.BadParameter("--memory and --model must be passed together.")
    if max_tokens is None and free is None:
        raise typer.BadParameter("Pass --max-tokens, or --model and --memory.")
    if share_prefix and auto_share:
        raise typer.BadParameter(
            "--share-prefix shares everywhere, --auto-share only where it pays; pass one."
        )
    samples = list(tracked(read_trace(trace), "reading"))
    planned = plan(
        samples,
        max_tokens=max_tokens,
        max_patches=max_patches,
        max_samples=max_samples,
        max_loss_tokens=max_loss_tokens,
        max_media_bytes=as_bytes(max_media_bytes, "--max-media-bytes"),
        ranks=ranks,
        share_prefix="auto" if auto_share else share_prefix,
        cost=None if cost is None else CostModel.load(cost),
        keep_groups=keep_groups,
        model=config,
        memory=free,
        defer_tail=defer_tail,
        max_policy_lag=max_policy_lag,
    )
    if save is not None:
        planned.save(save)
    document = {
        "stats": planned.stats,
        "total_samples": planned.total_samples,
        "total_tokens": planned.total_tokens,
        "ranks": planned.ranks,
        "deferred": [samples[i].sample_id for i in planned.deferred],
        "dropped": {d.sample_id: d.reason for d in planned.dropped},
        "bins": [
            {
                "samples": [samples[i].sample_id for i in members],
                "share": planned.share[b],
                "rows": planned.bin_rows[b],
                "tokens": sum(len(samples[i]) for i in members),
                "patches": planned.bin_patches[b],
                "loss_tokens": planned.bin_loss_tokens[b],
                "cost": planned.bin_costs[b],
            }
            for b, members in enumerate(planned.bins)
        ],
    }
    return Result(document, _for_people(document))


def _for_people(document: dict[str, Any]) -> list[str | Table]:
    totals = {"samples": document["total_samples"], "loss_tokens": document["total_tokens"]}
    totals |= {name: len(document[name]) for name in ("deferred", "dropped") if document[name]}
    stats = document["stats"]
    single = {name: value for name, value in stats.items() if not isinstance(value, list | dict)}
    rank_of = {b: rank for rank, bins in enumerate(document["ranks"]) for b in bins}
    # rows are what max_tokens bounds; without sharing they are the tokens
    shared = ("tokens", "share") if stats["rows_shared"] is not None else ()
    columns = ("rows", *shared, "patches", "loss_tokens", "cost")
    bins = [
        (b, rank_of[b], len(row["samples"]), *(row[name] for name in columns))
        for b, row in enumerate(document["bins"][:SHOWN])
    ]
    fills = [(b, f"{fill:6.1%}  {'█' * round(BAR * fill)}") for b, fill in stats["fills"].items()]
    out: list[str | Table] = [
        table(("what", "value"), [*totals.items(), *single.items()]),
        "",
        table(("budget", "filled"), fills),
        "",
        *_of_ranks(document),
        table(("bin", "rank", "samples", *columns), bins),
    ]
    if len(document["bins"]) > SHOWN:
        out.append(f"and {len(document['bins']) - SHOWN} bins more")
    return out


def _of_ranks(document: dict[str, Any]) -> list[str | Table]:
    """What each rank runs, where there are several: a bar is its cost compared with the costliest one's."""
    ranks, bins, loads = document["ranks"], document["bins"], document["stats"]["loads"]
    if len(ranks) < 2:
        return []
    counted, most = ("rows", "patches", "loss_tokens"), max(loads) or 1.0
    rows = []
    for rank, mine in enumerate(ranks[:SHOWN]):
        sums = [sum(bins[b][name] for b in mine) for name in counted]
        rows.append((rank, len(mine), *sums, loads[rank], "█" * round(BAR * loads[rank] / most)))
    more = [f"and {len(ranks) - SHOWN} ranks more"] if len(ranks) > SHOWN else []
    return [table(("rank", "bins", *counted, "cost", ""), rows), *more, ""]
