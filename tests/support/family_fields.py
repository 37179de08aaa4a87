"""docs/families.md's table of fields, from `Family`: `python tests/support/family_fields.py [--check]`.

A field says what it means at the end of its line, or in the lines above it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
SOURCE = ROOT / "mmpack" / "families" / "base.py"
HELD = {"Texts": "texts", "ImageSettings": "images", "TwoWay": "two_way"}
BEGIN, END = "<!-- fields: tests/support/family_fields.py -->\n", "<!-- /fields -->\n"


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
    after = head + BEGIN + table(SOURCE.read_text(encoding="utf-8")) + END + tail
    if after == before:
        return 0
    if args.check:
        print(f"{PAGE} is stale. Fix: python tests/support/family_fields.py", file=sys.stderr)
        return 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


def table(source: str) -> str:
    """One row per field of `Family`, and of the records that it holds, in their order."""
    lines = source.splitlines()
    kinds = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    rows = []
    for name in ("Family", *HELD):
        for node in kinds[name].body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            default = "" if node.value is None else f"`{ast.unparse(node.value)}`"
            kind = ast.unparse(node.annotation)
            prefix = f"{HELD[name]}." if name in HELD else ""
            cells = [f"`{prefix}{node.target.id}`", f"`{kind}`", default, comment_of(node, lines)]
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    head = ["| field | type | unless given | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def comment_of(node: ast.AnnAssign, lines: list[str]) -> str:
    """What stands behind the field; else the comments right above it."""
    last = lines[(node.end_lineno or node.lineno) - 1]
    behind = last[node.end_col_offset :] if node.end_lineno == node.lineno else last
    found = re.search(r"#\s*(.+)$", behind)
    if found:
        return found[1].strip()
    inside = [re.search(r"#\s*(.+)$", line) for line in lines[node.lineno - 1 : node.end_lineno]]
    above, at = [], node.lineno - 2
    while at >= 0 and lines[at].strip().startswith("#"):
        above.insert(0, lines[at].strip().lstrip("# "))
        at -= 1
    return " ".join([*above, *(found[1].strip() for found in inside if found)])


if __name__ == "__main__":
    sys.exit(main())
