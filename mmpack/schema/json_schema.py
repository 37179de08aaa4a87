"""The JSON schemas of a record of a trace and of an action, from the dataclasses' declarations."""

from __future__ import annotations

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
