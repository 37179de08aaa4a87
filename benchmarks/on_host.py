"""The report of a benchmark without a GPU: what ran, where, with which versions; how any benchmark was called."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.step.report import short

RESULTS = Path(__file__).parent / "results"


def write(
    path: Path, op: str, rows: list[dict[str, Any]], packages: Iterable[str], one_core: bool = False
) -> None:
    """`packages`: whose versions are named; `one_core`: what ran has one thread."""
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    report = {
        "op": op,
        "command": command(),
        "device": f"one of {cores}" if one_core else cores,
        "versions": {"python": platform.python_version()}
        | {p: importlib.metadata.version(p) for p in packages},
        "floors": {},
        "rows": [short(row, digits=6) for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def command() -> str:
    """How the benchmark was called, less options that only say where a file went."""
    words = list(sys.argv)
    for option in {"--out", "--keep", "--parts", "--work"} & {*words}:
        at = words.index(option)
        del words[at : at + 2]
    return shlex.join(["python", *words])
