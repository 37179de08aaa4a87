"""`mmpack schema`: the JSON schema of a record, and the table of rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Print nothing; exit 1 if FILE is not what is printed.",
        ),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="The page of the rules instead of the JSON schema.")
    ] = False,
) -> int:
    """Print the JSON schema of one record of a trace."""
    from mmpack.schema.generated import rules_markdown
    from mmpack.schema.json_schema import sample_schema

    text = rules_markdown() if rules else json.dumps(sample_schema(), indent=2) + "\n"
    if check is None:
        print(text, end="")
        return 0
    if check.read_bytes() == text.encode("utf-8"):
        return 0
    command_line = "mmpack schema --rules" if rules else "mmpack schema"
    print(f"mmpack: {check} is stale. Fix: {command_line} > {check}", file=sys.stderr)
    return 1
