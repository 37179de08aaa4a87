"""`mmpack schema`: the JSON schemas of a record and of an action, and the table of rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmpack.errors import ArgumentError
from mmpack.files import read_bounded

MAX_FILE = 2**24  # bytes


def command(
    check: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None,
    rules: bool = False,
    action: bool = False,
) -> int:
    """Print the JSON schema of one record of a trace.

    Args:
        check [FILE]: Print nothing; exit 1 if FILE differs from what would be printed.
        rules: Print the page of the rules instead of the JSON schema.
        action: Print the JSON schema of an action instead.

    Examples:
        mmpack schema
        mmpack schema --check sample.schema.json
    """
    from mmpack.schema.json_schema import (
        action_schema,
        rules_markdown,
        sample_schema,
        schema_text,
    )

    if rules and action:
        raise ArgumentError(
            "schema: --rules and --action print two different pages. Fix: pass one of them"
        )
    text = (
        rules_markdown() if rules else schema_text(action_schema() if action else sample_schema())
    )
    if check is None:
        print(text, end="")
        return 0
    if read_bounded(check, MAX_FILE) == text.encode("utf-8"):
        return 0
    command_line = "mmpack schema" + " --rules" * rules + " --action" * action
    print(
        f"mmpack: {check} is not what {command_line} prints. Fix: if an older mmpack wrote it, write it again",
        file=sys.stderr,
    )
    return 1
