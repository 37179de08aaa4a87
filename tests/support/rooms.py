"""CONTRIBUTING.md's table of rooms, from the import contract: `python tests/support/rooms.py [--check]`.

The order is that of the layers in pyproject.toml, the text that of each room's docstring.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

from generated import between, keep

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: tests/support/rooms.py -->\n", "<!-- /rooms -->\n"


def table() -> str:
    """One row per room, lowest layer first."""
    rows = [f"| {name} | {text} |" for name, text in rooms()]
    return "\n".join(["| room | what is in it |", "| --- | --- |", *rows]) + "\n"


def rooms() -> list[tuple[str, str]]:
    """Name and first line of the docstring of each room, in import order."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    names = [name.strip() for layer in reversed(contract["layers"]) for name in layer.split("|")]
    out = []
    for name in names:
        path = ROOT / "mmpack" / name
        folder = path.is_dir()
        module = path / "__init__.py" if folder else path.with_suffix(".py")
        docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
        assert docstring, f"{module} has no docstring"
        text = docstring.partition("\n")[0].removesuffix(".").replace("|", "\\|")
        out.append((f"`{name}/`" if folder else f"`{name}.py`", text))
    return out


if __name__ == "__main__":
    page = between(PAGE, BEGIN, END, table())
    sys.exit(keep(__doc__, "tests/support/rooms.py", {PAGE: page}))
