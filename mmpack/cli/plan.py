"""`mmpack plan TRACE`: the micro-batches that a trace makes under given budgets."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from mmpack.cli.output import JsonOption, OutOption, TraceArgument, emit, table, watched

SHOWN = 50  # bins, on the screen


def command(
    trace: TraceArgument,
    max_tokens: Annotated[int, typer.Option(min=1, help="Packed rows of a micro-batch.")],
    max_patches: Annotated[
        int | None, typer.Option(min=0, help="Vision patches of a micro-batch.")
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share the micro-batches.")] = 1,
    share_prefix: Annotated[
        bool, typer.Option("--share-prefix", help="Count rows of a shared prefix once.")
    ] = False,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Plan micro-batches and show how full they are and how even the ranks."""
    from mmpack.planning.plan import plan
    from mmpack.schema.trace import read_trace

    samples = list(watched(read_trace(trace), "reading"))
    planned = plan(
        samples,
        max_tokens=max_tokens,
        max_patches=max_patches,
        max_samples=max_samples,
        ranks=ranks,
        share_prefix=share_prefix,
    )
    document = {
        "stats": planned.stats,
        "total_samples": planned.total_samples,
        "total_tokens": planned.total_tokens,
        "ranks": planned.ranks,
        "bins": [
            {
                "samples": [samples[i].sample_id for i in members],
                "rows": rows,
                "tokens": sum(len(samples[i]) for i in members),
                "patches": patches,
                "loss_tokens": sum(samples[i].num_loss_tokens for i in members),
            }
            for members, rows, patches in zip(
                planned.bins, planned.bin_rows, planned.bin_patches, strict=True
            )
        ],
    }
    emit(document, _for_people(document), as_json, out)
    return 0


def _for_people(document: dict[str, Any]) -> list[str | Table]:
    totals = {"samples": document["total_samples"], "loss_tokens": document["total_tokens"]}
    rank_of = {b: rank for rank, bins in enumerate(document["ranks"]) for b in bins}
    # rows are what max_tokens bounds; without sharing they are the tokens
    shared = ("tokens",) if document["stats"]["rows_shared"] is not None else ()
    columns = ("rows", *shared, "patches", "loss_tokens")
    bins = [
        (b, rank_of[b], len(row["samples"]), *(row[name] for name in columns))
        for b, row in enumerate(document["bins"][:SHOWN])
    ]
    out: list[str | Table] = [
        table(("what", "value"), [*totals.items(), *document["stats"].items()]),
        "",
        table(("bin", "rank", "samples", *columns), bins),
    ]
    if len(document["bins"]) > SHOWN:
        out.append(f"and {len(document['bins']) - SHOWN} bins more")
    return out
