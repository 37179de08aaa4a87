"""The report of a benchmark without a GPU: what ran, where, with which versions."""

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

RESULTS = Path(__file__).parent / "results"


def write(
    path: Path, op: str, rows: list[dict[str, Any]], packages: Iterable[str], one_core: bool = False
) -> None:
    """`packages`: whose versions are named; `one_core`: what ran has one thread."""
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    report = {
        "op": op,
        "command": shlex.join(["python", *sys.argv]),
        "device": f"one of {cores}" if one_core else cores,
        "versions": {"python": platform.python_version()}
        | {p: importlib.metadata.version(p) for p in packages},
        "floors": {},
        "rows": [{k: short(v) for k, v in row.items()} for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def short(value: Any) -> Any:
    """Six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
