"""What the commands share: --json and --out, lines and tables for people."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mmpack.errors import ArgumentError, no_command, one_line
from mmpack.files import write_text

if TYPE_CHECKING:
    from mmpack.schema.rules import Problem

OUTPUTS = "mmpack.outputs"  # in a context's `meta`


def writable(ctx: typer.Context, param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Declare an option that names a file to write: `root.Command` keeps inputs from being named by one."""
    if value is not None:
        check_writable(value)
        ctx.meta.setdefault(OUTPUTS, {})[param.name] = value
    return value


def check_writable(path: Path) -> None:
    """Refuse a path that can't be written before the work is done, not after."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder.")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist.")


def refuse_shared(command: str, *targets: Path | None) -> None:
    """Refuse two outputs with the same path, unless it is a device."""
    given = [t for t in targets if t is not None and (t.is_file() or not t.exists())]
    named = list(map(os.path.realpath, given))
    for k, path in enumerate(named):
        if path in named[:k]:
            raise ArgumentError(
                f"{command}: {os.path.basename(path)!r:.60} is named for two documents. "
                "Fix: name a different file for each"
            )


TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A .jsonl, .jsonl.zst or .parquet trace.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout instead.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", callback=writable, help="Write the JSON document to FILE too."
    ),
]
OutputFile = Annotated[Path | None, typer.Option(callback=writable)]
InputFolder = Annotated[Path | None, typer.Option(file_okay=False, exists=True)]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", callback=writable, help="Write a page to FILE too."),
]


@dataclass(frozen=True)
class Result:
    """What a command found: a JSON document, lines and tables for people, and its exit code.

    `as_json`: print the document, as with `--json`; `text`: print this instead of both.
    """

    document: dict[str, Any]
    lines: Iterable[str | Table] = ()
    code: int = 0
    as_json: bool = False
    text: str | None = None


def emit(result: Result, as_json: bool, out: Path | None) -> int:
    """Write the document to `out` if it is given, and print it or what is for people; returns the exit code."""
    document = json_text(_finite(result.document)) + "\n"
    if out is not None:
        write_text(out, document)
    if result.text is not None or as_json or result.as_json:
        print(document if result.text is None else result.text, end="")
    else:
        show(result.lines)
    return int(result.code)


def show(human: Iterable[str | Table]) -> None:
    """Print lines and tables for people."""
    console = Console(markup=False, highlight=False, emoji=False, width=_width())
    for part in human:
        if isinstance(part, Table):
            with console.capture() as drawn:
                console.print(part)
            print(no_command(drawn.get()), end="")
        else:
            print(no_command(one_line(part)))


def problem_document(problem: Problem) -> dict[str, Any]:
    """A broken rule as JSON, the same for every command; `span` is [start, stop) in tokens, or null."""
    names = ("code", "sample_id", "field", "message", "span", "fix")
    found = {name: getattr(problem, name) for name in names}
    return found | {"span": None if problem.span is None else list(problem.span)}


def json_text(document: Any) -> str:
    """Indented JSON in which no text is a command to a runner of CI: see `no_command`."""
    return json.dumps(document, indent=2, allow_nan=False).replace("##", "\\u0023#")


def _width() -> int | None:
    """Width of lines: the terminal's, or COLUMNS; a file or a pipe takes whole rows."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else 10_000


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose numbers stand to the right; texts are escaped and folded, never cut."""
    cells = [list(row) for row in rows]
    out = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        number = bool(cells) and all(isinstance(row[i], int | float) for row in cells)
        out.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in cells:
        out.add_row(*map(_cell, row))
    return out


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else one_line(str(value))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
