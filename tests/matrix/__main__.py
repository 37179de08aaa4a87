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
from mmpack.cli.output import show, table


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, exists=True)],
    only: Annotated[str | None, typer.Option(metavar="NAME")] = None,
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
    made = [f"{name}: {about or 'not installed'}" for name, about in result.frameworks.items()]
    made += [f"{name}: {why}" for name, why in failed.items()]
    equal, word = sum(c.ok for c in result.compared), "OK" if result.ok else "DIFFERENT"
    verdict = f"{word}: {equal} of {len(result.compared)} pairs compared are equal"
    show([verdict, *made, table(("rollout \\ train", *TRAINERS), rows)])
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(mmpack.cli.main.main(command=command, name="matrix"))
