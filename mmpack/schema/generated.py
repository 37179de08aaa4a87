"""Files that are generated from the schema: those of `schemas/`, and `docs/rules.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmpack.schema.codes import RULES
from mmpack.schema.json_schema import action_schema, sample_schema


def write_generated(root: Path) -> list[Path]:
    """Write the generated files below `root`, the folder of the repository; returns their paths."""
    for path, text in _generated(root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(_generated(root))


def check_generated(root: Path) -> list[Path]:
    """The generated files below `root` that are missing or stale."""
    return [
        path
        for path, text in _generated(root).items()
        if not path.is_file() or path.read_bytes() != text.encode("utf-8")
    ]


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as its file holds it."""
    return json.dumps(schema, indent=2) + "\n"


def rules_markdown() -> str:
    """Return the page of the rules: a table per block of codes."""
    blocks = {
        "MM0": ("Structure", "A file that breaks one is not read (exit 2)."),
        "MM1": ("Media and modality spans", "A broken rule of a sample: `validate` exits 1."),
        "MM2": ("Loss and other spans", "A broken rule of a sample: `validate` exits 1."),
        "MM3": ("Columns and scores", "A broken rule of a sample: `validate` exits 1."),
        "MM4": ("Planning and packing", "What can't be planned or packed."),
        "MM5": (
            "Runs",
            "What went wrong around a sample, as dead letters and `BlobError.code` name it.",
        ),
    }
    lines = [
        "# Rules",
        "",
        "`mmpack explain CODE` says more on each: an example that breaks it, what it looks like, how to fix it.",
        "This table is generated from `mmpack/schema/codes.py`: do not edit.",
    ]
    for prefix, (title, meaning) in blocks.items():
        lines += [
            "",
            f"## {title}",
            "",
            meaning,
            "",
            "| code | says | fix |",
            "| --- | --- | --- |",
        ]
        rules = [r for r in RULES.values() if r.code.startswith(prefix)]
        lines += [f'| <a id="{r.code}"></a>{r.code} | {r.says} | {r.fix} |' for r in rules]
    return "\n".join(lines) + "\n"


def _generated(root: Path) -> dict[Path, str]:
    return {
        root / "schemas" / "sample.schema.json": schema_text(sample_schema()),
        root / "schemas" / "action.schema.json": schema_text(action_schema()),
        root / "docs" / "rules.md": rules_markdown(),
    }
