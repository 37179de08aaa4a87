"""`mmpack smoke`: one GRPO step on geometry problems or clips, from media to the optimizer, every check printed."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import typer

from mmpack.cli.output import HtmlOption, JsonOption, Result
from mmpack.demo.options import SmokeOptions
from mmpack.errors import require


def command(as_json: bool = False, **options: Any) -> Result:
    """Take one GRPO step on geometry problems, or on clips, and check every stage of it. Exits 1 if a check fails.

    Examples:
        mmpack smoke
        mmpack smoke --inject max_pixels --html report.html
    """
    for package in ("torch", "transformers", "PIL"):
        require(package, "smoke", "mmpack smoke")
    if options["video"]:
        require("av", "video", "mmpack smoke --video")
    from mmpack.demo.run import run

    # with --json, stdout holds only the document
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report = run(SmokeOptions(**options))
    return Result(report.to_dict(), code=report.exit_code)


def _parameters() -> Iterator[inspect.Parameter]:
    """The fields of SmokeOptions that are options of the command, and the options that commands share."""
    types = get_type_hints(SmokeOptions)
    for field in fields(SmokeOptions):
        if field.metadata:
            name = f"--{field.name.replace('_', '-')}"
            option = typer.Option(field.default, name, **field.metadata)
            yield _parameter(field.name, types[field.name], option)
    yield _parameter("as_json", JsonOption, False)
    yield _parameter("html", HtmlOption, None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


# typer makes the command line of this signature
command.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
