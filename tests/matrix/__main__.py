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
from matrix.traces import ENGINES, NAMES, TRAINERS, compare_traces, run

import mmpack.cli.main
from mmpack.cli.output import JsonOption, OutOption, emit, table


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, exists=True)],
    only: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Write the traces of what is installed here into DIR, compare all that lie there, print a table."""
    with redirect_stdout(sys.stderr):  # frameworks print, and stdout is for the result
        failed = run(folder, NAMES if only is None else [only])
    if only is not None:
        print(*failed.values(), sep="\n", file=sys.stderr)
        return int(bool(failed))
    result = compare_traces(folder, failed)
    shown = {(c.engine, c.trainer): c.verdict for c in result.cells}
    rows = [[engine, *(shown.get((engine, t), "-") for t in TRAINERS)] for engine in ENGINES]
    made = [
        f"{name}: {about or 'not installed'}"
        for name, about in result.frameworks.items()
        if about or name not in result.failed
    ]
    made += [f"{name}: {why}" for name, why in result.failed.items()]
    compared = [c for c in result.cells if c.compared]
    equal = sum(c.ok for c in compared)
    verdict = (
        f"{'OK' if result.ok else 'DIFFERENT'}: {equal} of {len(compared)} pairs compared are equal"
    )
    lines = [verdict, *made, table(("rollout \\ train", *TRAINERS), rows)]
    emit(result.to_dict(), lines, as_json, out)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(mmpack.cli.main.main(command=command, name="matrix"))
