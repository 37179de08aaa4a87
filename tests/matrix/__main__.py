"""One fixture through every framework that is installed; the traces of each engine against each trainer's.

    PYTHONPATH=tests python -m matrix DIR [--only NAME]

Each environment writes the traces of what it has into one folder, and all that lie there are compared; with --only,
that of NAME is written and nothing compared.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from matrix.traces import NAMES, compare_traces, run

import mmpack.cli.main


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, exists=True)],
    only: Annotated[str | None, typer.Option(metavar="NAME")] = None,
) -> int:
    """Write the traces of what is installed here into DIR, compare all that lie there, print a line for each pair."""
    with redirect_stdout(sys.stderr):  # frameworks print, and stdout is for the result
        run(folder, NAMES if only is None else [only])
    if only is not None:
        return 0
    reports = compare_traces(folder)
    for (engine, trainer), report in reports.items():
        print(f"{engine} -> {trainer}: {report.first or report.summary()}")
    return 0 if all(report.ok for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(mmpack.cli.main.main(command=command, name="matrix"))
