"""The table of docs/families.md, from fixtures/conformance/*.json: `python tests/conformance/table.py [--check]`.

`make conformance` writes those files; nothing in the table is typed in. Rows are in the order of FAMILIES.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmpack.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
RESULTS = ROOT / "fixtures" / "conformance"
BEGIN, END = "<!-- families: tests/conformance/table.py -->\n", "<!-- /families -->\n"
# heading → the checks behind it, all of which must pass
COLUMNS = {
    "layout": ("layout", "positions"),
    "parity": ("parity",),
    "packed": ("pack", "padded"),
    "shared": ("share",),
    "video": ("video",),
    "fused head": ("head",),
    "tower": ("tower",),
    "LoRA": ("lora",),
    "`generate`": ("generate",),
    "TRL": ("trl",),
    "verl": ("verl",),
}
YES, NO, LACKS, UNKNOWN = "yes", "**no**", "–", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the table is stale")
    args = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        fix = f"add {BEGIN.strip()} … {END.strip()}"
        print(f"{PAGE} has lost its marks. Fix: {fix}", file=sys.stderr)
        return 1
    after = head + BEGIN + text(read(RESULTS)) + END + tail
    if after == before:
        return 0
    if args.check:
        print(f"{PAGE} is stale. Fix: python tests/conformance/table.py", file=sys.stderr)
        return 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Family → check → result. Raises: SystemExit for a file of a family that is unknown."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in FAMILIES:
            raise SystemExit(f"{path} is of no family. Fix: remove it")
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))["checks"]
    return {name: found[name] for name in FAMILIES if name in found}


def text(results: dict[str, dict[str, Any]]) -> str:
    """The table, a line on each cell that is not `yes`, and the versions."""
    notes: dict[str, dict[str, list[str]]] = {heading: {} for heading in COLUMNS}
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"| --- |{' :-: |' * len(COLUMNS)}"]
    for family, checks in results.items():
        cells = []
        for heading, names in COLUMNS.items():
            cell, why = _cell([checks.get(name) for name in names])
            cells.append(cell)
            if why:
                notes[heading].setdefault(why, []).append(f"`{family}`")
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    out = ["\n".join(lines), f"Run on {_versions(results.values())}."]
    lines = [
        f"- {heading}, {', '.join(families)}: {why}."
        for heading, reasons in notes.items()
        for why, families in reasons.items()
    ]
    if lines:
        out += ["Where a cell has no `yes`:", "\n".join(lines)]
    return "\n\n".join(out) + "\n"


def _cell(found: list[dict[str, Any] | None]) -> tuple[str, str | None]:
    """What stands in a cell, and why, where it is not `yes`."""
    for result, cell in (("failed", NO), ("lacks", LACKS)):
        for one in found:
            if one is not None and one["result"] == result:
                return cell, one["why"]
    return (YES if all(found) else UNKNOWN), None


def _versions(families: Iterable[dict[str, Any]]) -> str:
    """Every version that a check ran on, the newest first."""
    seen: dict[str, set[str]] = {}
    for checks in families:
        for one in checks.values():
            for package, version in one.get("versions", {}).items():
                if version is not None:
                    seen.setdefault(package, set()).add(version)
    order = sorted(seen, key=["transformers", "torch", "peft", "trl", "verl"].index)
    return ", ".join(f"{name} {_newest_first(seen[name])}" for name in order)


def _newest_first(versions: set[str]) -> str:
    def number(version: str) -> list[int]:
        return [int(part) for part in version.partition("+")[0].split(".") if part.isdecimal()]

    return " and ".join(sorted(versions, key=number, reverse=True))


if __name__ == "__main__":
    sys.exit(main())
