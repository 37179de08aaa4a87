"""`mmpack parity A B`: does the trainer see what the rollout engine saw?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmpack.cli.output import HtmlOption, JsonOption, OutOption, emit, watched, write_text

SHOWN = 20  # findings, on the screen


def command(
    rollout: Annotated[Path, typer.Argument(metavar="A", help="The rollout's trace.")],
    train: Annotated[Path, typer.Argument(metavar="B", help="The trainer's trace.")],
    require: Annotated[
        str,
        typer.Option(metavar="FIELD,...", help="Fields that must be compared in every sample."),
    ] = "input_ids,media,loss_spans",
    max_findings: Annotated[
        int, typer.Option(min=1, help="How many findings to keep; all are counted.")
    ] = 1000,
    as_json: JsonOption = False,
    out: OutOption = None,
    html: HtmlOption = None,
) -> int:
    """Compare the layouts of two traces and name the cause of each difference."""
    from mmpack.parity.compare import compare
    from mmpack.schema.trace import read_trace

    report = compare(
        watched(read_trace(rollout), "comparing"),
        read_trace(train),
        require=[name.strip() for name in require.split(",") if name.strip()],
        max_findings=max_findings,
    )
    if html is not None:
        write_text(html, report.to_html())
    verdict = "OK" if report.ok else "DIFFERENT" if report.total_findings else "NOT COMPARED"
    summary, *lines = report.lines(min(SHOWN, max_findings))
    numbers = summary.partition(": ")[2]
    emit(report.to_dict(), [f"{verdict}: {numbers}", *lines], as_json, out)
    return 0 if report.ok else 1
