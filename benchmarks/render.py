"""docs/performance.md from benchmarks/results/*.json: `python benchmarks/render.py [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = Path(__file__).parent / "results"

HEAD = """# Performance

Made by `benchmarks/render.py` from `benchmarks/results/`. Each benchmark first holds its op to the numerical contract
and stops where it fails. Times are medians on the device that is named; compare ratios within one table, since
a card's rate moves from day to day. `copy` is the bandwidth of a large copy on the device, bytes read and written.
Kernels for ROCm (gfx942) are compiled in CI, and not run.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is another")
    args = parser.parse_args()
    page = "\n".join(
        [HEAD, *(_section(json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json")))]
    )
    if not args.check:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    print(f"{PAGE} is not what its results give. Fix: python benchmarks/render.py", file=sys.stderr)
    return 1


def _section(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    floors = ", ".join(_floor(name, value) for name, value in report["floors"].items())
    lines = [
        f"## {report['op']}",
        "",
        f"{report['device']}, {versions}." + (f" Floors of the run: {floors}." if floors else ""),
    ]
    lines += ["", "```", *(report.get("commands") or [report["command"]]), "```", ""]
    rows = [row for row in report["rows"] if "did_not_run" not in row]
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in names}
    same = {n for n in names if len(rows) > 1 and all(v == values[n][0] for v in values[n])}
    if same:
        of_all = (f"{_name(n)} {_cell(n, values[n][0])}" for n in names if n in same)
        lines += [f"Of all rows: {', '.join(of_all)}.", ""]
    # What few rows have is in the JSON alone.
    names = [
        n for n in names if n not in same and sum(v is not None for v in values[n]) * 4 > len(rows)
    ]
    lines += [f"| {' | '.join(map(_name, names))} |", "| --- " * len(names) + "|"]
    lines += [f"| {' | '.join(_cell(name, row.get(name)) for name in names)} |" for row in rows]
    failed = [row for row in report["rows"] if "did_not_run" in row]
    lines += [
        "",
        *(f"{row['name']} did not run: {_cell('', row['did_not_run'])}\n" for row in failed),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _name(column: str) -> str:
    return column.replace("_", " ")


def _floor(name: str, value: float) -> str:
    if name == "copy_bytes_per_second":
        return f"copy {value / 1e12:.2f} TB/s"
    return f"{_name(name)} {value:.4g}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("bytes"):
        return f"{value / 1e9:.3f} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"
    if name.endswith("flops") and value:
        return f"{value / 1e12:.3g} T"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
