"""docs/start.ipynb, made of docs/start.md: `python docs/site/notebook.py [--check]`. Cells have no outputs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
ITSELF = re.compile(r"^The same page as a notebook: .*\n", re.MULTILINE)


def notebook(page: str) -> str:
    """The notebook of a page: its python blocks are cells, and so is the text between them."""
    cells = []
    for k, part in enumerate(BLOCK.split(ITSELF.sub("", page))):
        if text := part.strip():
            kind = "code" if k % 2 else "markdown"
            lines = text.splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines}
            cells.append(cell | ({"execution_count": None, "outputs": []} if k % 2 else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the notebook is stale")
    args = parser.parse_args()
    path = DOCS / "start.ipynb"
    text = notebook((DOCS / "start.md").read_text(encoding="utf-8"))
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    if args.check:
        print(f"{path} is stale. Fix: python docs/site/notebook.py", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
