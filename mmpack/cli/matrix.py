"""`mmpack parity --matrix DIR`: one fixture through all that is installed; every engine against every trainer."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from mmpack.cli.output import emit, table


def matrix(folder: Path, as_json: bool, out: Path | None) -> int:
    """Write the traces of what is installed here into `folder`, compare all that lie there, print a table."""
    from mmpack.smoke.matrix import ENGINES, TRAINERS, compare_traces, run

    with redirect_stdout(sys.stderr):  # frameworks print, and stdout is for the result
        failed = run(folder)
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
    emit(
        result.to_dict(),
        [verdict, *made, table(("rollout \\ train", *TRAINERS), rows)],
        as_json,
        out,
    )
    return 0 if result.ok else 1
