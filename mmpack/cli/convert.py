"""`mmpack convert A B`: a trace as another file: of another version of the schema, of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmpack.cli.output import JsonOption, OutOption, TraceArgument, emit, writable
from mmpack.progress import tracked

if TYPE_CHECKING:
    from mmpack.schema.sample import Sample


def command(
    trace: TraceArgument,
    to: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            callback=writable,
            help="The trace to write: .jsonl, .jsonl.zst or .parquet.",
        ),
    ],
    schema_version: Annotated[
        Literal["1", "2"],
        typer.Option(
            help="Version of the schema to write; 1 has no room for what the engine did (kept ids, routes, teachers)."
        ),
    ] = "2",
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Write a trace in another version of the schema, or as another type of file.

    FILE is written whole or not at all. A sample that does not fit the version is an error; nothing is dropped.
    """
    from collections import Counter

    from mmpack.schema.trace import read_trace, write_trace

    versions: Counter[str] = Counter()

    def counted() -> Iterator[Sample]:
        for sample in tracked(read_trace(trace), "converting"):
            versions[sample.schema_version] += 1
            yield sample

    samples = write_trace(to, counted(), schema_version=schema_version)
    document = {
        "samples": samples,
        "from": dict(sorted(versions.items())),
        "schema_version": schema_version,
        "file": str(to),
    }
    held = ", ".join(f"{count} of version {version}" for version, count in sorted(versions.items()))
    emit(
        document,
        [f"OK: {samples} samples ({held or 'none'}) to {to}, version {schema_version}"],
        as_json,
        out,
    )
    return 0
