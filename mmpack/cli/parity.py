"""`mmpack parity A B`: does the trainer see what the rollout engine saw?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmpack.cli.ci_formats import FORMATS
from mmpack.cli.output import HtmlOption, InputFolder, JsonOption, Result, table
from mmpack.errors import require as require_extra
from mmpack.files import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from mmpack.parity.drift import LogprobDrift

Format = Literal["text", "json", "github", "sarif", "junit"]  # what stdout gets
SHOWN = 20  # findings, on the screen
KEPT = 1000  # in the report
REQUIRE = "input_ids,media,loss_spans"


def command(
    rollout: Path,
    train: Path,
    require: str = REQUIRE,
    max_findings: Annotated[int, typer.Option(min=1)] = KEPT,
    as_json: JsonOption = False,
    format: Format | None = None,
    html: HtmlOption = None,
    media_root: InputFolder = None,
    tokenizer: str | None = None,
) -> Result:
    """Compare the layouts of two traces and name the cause of each difference.

    Args:
        rollout [A]: The rollout's trace.
        train [B]: The trainer's trace.
        require [FIELD,...]: Fields that both sides must have in every sample.
        max_findings: How many findings to keep; all are counted.
        format: text; json, as --json; github: workflow annotations; sarif: a SARIF 2.1.0 log; junit: JUnit XML.
        media_root [DIR]: Where --html finds pictures and videos.
        tokenizer [NAME]: A tokenizer's folder or hub name, to show differing tokens as text.

    Examples:
        mmpack parity rollout.jsonl train.jsonl
        mmpack parity rollout.jsonl train.jsonl --format github
    """
    if as_json and format not in (None, "json"):
        raise typer.BadParameter(f"--json and --format {format} are two formats; pass one.")
    from mmpack.parity.compare import NEVER, compare
    from mmpack.parity.drift_traces import trace_drift
    from mmpack.schema.trace import read_trace

    decode = None
    if tokenizer is not None:
        require_extra("transformers", "hf", "--tokenizer")
        from mmpack.adapters.transformers.load import load_decoder

        decode = load_decoder(tokenizer)
    left, right = read_trace(rollout), read_trace(train)
    report = compare(
        left,
        right,
        require=[name.strip() for name in require.split(",") if name.strip()],
        decode=decode,
        max_findings=max_findings,
    )
    drift, left_out = None, None
    if NEVER in report.not_compared.get("rollout_logprobs", ""):  # both sides have logprobs
        drift, left_out = trace_drift(left, right)
    if html is not None:
        from mmpack.view import html as page

        write_text(html, page(report, media_root=media_root, decode=decode, drift=drift))
    document = report.to_dict() | {"drift": None}
    if left_out is not None:  # logprobs on both sides
        document["drift"] = ({} if drift is None else drift.to_dict()) | {"left_out": left_out}
    verdict = "OK" if report.ok else "DIFFERENT" if report.total_findings else "NOT COMPARED"
    summary, *lines = report.lines(min(SHOWN, max_findings))
    numbers = summary.partition(": ")[2]
    human = [f"{verdict}: {numbers}", *lines, *_drift(drift, left_out or {})]
    printed = FORMATS[format](report, rollout, train) if format in FORMATS else None
    return Result(document, human, 0 if report.ok else 1, format == "json", printed)


def _drift(drift: LogprobDrift | None, left_out: dict[str, int]) -> Iterator[str | Table]:
    from mmpack.parity.drift_axes import COLUMNS
    from mmpack.parity.drift_traces import CARRIED
    from mmpack.parity.report import counted

    for why, count in left_out.items():
        if why == CARRIED:
            continue  # so do most traces of a trainer
        yield f"logprobs: {counted(count, 'sample')} left out: {why}"
    if drift is None:
        return
    yield from drift.lines()
    rows = [
        ("" if k else name, *group.row)
        for name, axis in drift.axes.items()
        if len(axis.groups) > 1
        for k, group in enumerate(axis.groups)
    ]
    if rows:
        yield table(("by", *COLUMNS), rows)
