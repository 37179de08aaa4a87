"""`mmpack parity A B`: does the trainer see what the rollout engine saw?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmpack.cli.output import HtmlOption, JsonOption, OutOption, emit, watched
from mmpack.errors import require as require_extra
from mmpack.files import write_text

SHOWN = 20  # findings, on the screen
KEPT = 1000  # in the report
REQUIRE = "input_ids,media,loss_spans"


def command(
    rollout: Annotated[
        Path | None, typer.Argument(metavar="A", help="The rollout's trace.")
    ] = None,
    train: Annotated[Path | None, typer.Argument(metavar="B", help="The trainer's trace.")] = None,
    require: Annotated[
        str,
        typer.Option(metavar="FIELD,...", help="Fields that must be compared in every sample."),
    ] = REQUIRE,
    max_findings: Annotated[
        int, typer.Option(min=1, help="How many findings to keep; all are counted.")
    ] = KEPT,
    as_json: JsonOption = False,
    out: OutOption = None,
    html: HtmlOption = None,
    media_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            exists=True,
            help="Where --html finds pictures and videos.",
        ),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            exists=True,
            help="Run one fixture through every framework installed, and compare the traces in DIR.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A tokenizer's folder or hub name: decodes what differs."
        ),
    ] = None,
) -> int:
    """Compare the layouts of two traces and name the cause of each difference."""
    if matrix is not None:
        others = (rollout, html, media_root, tokenizer)
        if any(x is not None for x in others) or (require, max_findings) != (REQUIRE, KEPT):
            raise typer.BadParameter(
                "--matrix takes no traces, and of the options --json and --out."
            )
        from mmpack.cli.matrix import matrix as run_matrix

        return run_matrix(matrix, as_json, out)
    if rollout is None or train is None:
        missing = "A" if rollout is None else "B"
        raise typer.BadParameter(f"Missing argument '{missing}'.")
    from mmpack.parity.compare import compare
    from mmpack.schema.trace import read_trace

    decode = None
    if tokenizer is not None:
        require_extra("transformers", "hf", "--tokenizer")
        from mmpack.adapters.transformers.tokenizer import load_decoder

        decode = load_decoder(tokenizer)
    left, right = read_trace(rollout), read_trace(train)
    by_columns = left.is_parquet and right.is_parquet  # fast, but not sample by sample
    report = compare(
        left if by_columns else watched(left, "comparing"),
        right,
        require=[name.strip() for name in require.split(",") if name.strip()],
        decode=decode,
        max_findings=max_findings,
    )
    if html is not None:
        from mmpack.view import html as page

        write_text(html, page(report, media_root=media_root, decode=decode))
    verdict = "OK" if report.ok else "DIFFERENT" if report.total_findings else "NOT COMPARED"
    summary, *lines = report.lines(min(SHOWN, max_findings))
    numbers = summary.partition(": ")[2]
    emit(report.to_dict(), [f"{verdict}: {numbers}", *lines], as_json, out)
    return 0 if report.ok else 1
