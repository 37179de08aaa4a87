"""The JSON schemas of a record of a trace and of an action, from their fields' specs; the page of the rules."""

from __future__ import annotations

import json
from typing import Any

from mmpack.schema.actions import ACTIONS, Action, Scroll
from mmpack.schema.codes import RULES
from mmpack.schema.fields import Record, Records
from mmpack.schema.sample import Sample


def sample_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a record; `x-rules` holds the rules that it can't express."""
    records: dict[str, type[Record]] = {}
    _collect(Sample, records)
    top = _object(Sample)
    top["required"] = ["schema_version", *top["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mmpack sample",
        **top,
        "$defs": {name: _object(cls) for name, cls in records.items()},
        "x-rules": {r.code: {"says": r.says, "fix": r.fix} for r in RULES.values()},
    }


def action_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of an action with a `kind`; that its points are on the screen, it can't express."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mmpack action",
        "oneOf": [{"$ref": f"#/$defs/{cls.__name__}"} for cls in ACTIONS.values()],
        "$defs": {cls.__name__: _action(cls) for cls in ACTIONS.values()},
    }


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


def _action(cls: type[Action]) -> dict[str, Any]:
    plain = _object(cls)
    required = {"required": ["kind", *plain["required"]]}
    if cls is Scroll:
        required["anyOf"] = [{"required": ["dx"]}, {"required": ["dy"]}]  # type: ignore[list-item]
    properties = {"kind": {"const": cls.kind}} | plain["properties"]
    return plain | {"properties": properties} | required


def _collect(cls: type[Record], into: dict[str, type[Record]]) -> None:
    for declared in cls.columns().values():
        if isinstance(declared.spec, Records):
            inner = declared.spec.cls
            into[inner.__name__] = inner
            _collect(inner, into)


def _object(cls: type[Record]) -> dict[str, Any]:
    columns = cls.columns()
    return {
        "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
        "type": "object",
        "properties": {n: {"description": c.doc} | c.spec.schema() for n, c in columns.items()},
        "required": [n for n, c in columns.items() if c.required],
    }
