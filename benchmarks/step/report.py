"""The report of the step's benchmark: one JSON file that grows by a row whenever a peer is done."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, installed_version
from mmpack.files import write_text

OP = "step"
KEY = ("device", "model", "workload", "peer", "ranks", "options")
_PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "liger-kernel")


def read(path: Path | None) -> dict[str, Any]:
    """The report in `path`; an empty one where there is none yet.

    Raises: ArgumentError for a file that is no report of this benchmark.
    """
    if path is None or not path.exists():
        return {"op": OP, "machines": {}, "rows": []}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("op") != OP:
        raise ArgumentError(
            f"benchmarks.step: {path} is not a report of this benchmark. Fix: name another --out"
        )
    return report


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is a measurement of."""
    return tuple(row.get(name) for name in KEY)


def has(report: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the report has a row of the same."""
    return any(key(other) == key(row) for other in report["rows"])


def add(path: Path | None, row: dict[str, Any]) -> None:
    """Put the row into the file, in place of one of the same. The file is read again: others may have added to it."""
    if path is None:
        return
    report = read(path)
    report["machines"][row["device"]] = versions()
    report["rows"] = [r for r in report["rows"] if key(r) != key(row)] + [short(row)]
    write_text(path, json.dumps(report, indent=1) + "\n")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {name: v for name in _PACKAGES if (v := installed_version(name)) is not None}
    return found


def short(row: Any, digits: int = 4) -> Any:
    """Floats to so many digits."""
    if isinstance(row, dict):
        return {name: short(value, digits) for name, value in row.items()}
    return float(f"{row:.{digits}g}") if isinstance(row, float) else row
