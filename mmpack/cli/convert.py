"""`mmpack convert A B`: a trace as another file: of another version of the schema, of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmpack.cli.output import Result, TraceArgument, writable
from mmpack.parity.report import counted
from mmpack.progress import tracked

if TYPE_CHECKING:
    from mmpack.schema.sample import Sample


def command(
    trace: TraceArgument,
    to: Annotated[Path, typer.Argument(callback=writable)],
    schema_version: Literal["1", "2"] = "2",
) -> Result:
    """Write a trace in another version of the schema, or as another type of file.

    FILE is written whole or not at all. A sample that does not fit the version is an error; nothing is dropped.

    Args:
        to [FILE]: The trace to write: .jsonl, .jsonl.zst or .parquet.
        schema_version: Version of the schema to write; 1 has no room for what the engine did (kept ids, routes,
            teachers).

    Examples:
        mmpack convert rollout.jsonl rollout.parquet
    """
    from collections import Counter

    from mmpack.schema.trace import read_trace, write_trace

    versions: Counter[str] = Counter()

    def noted() -> Iterator[Sample]:
        for sample in tracked(read_trace(trace), "converting"):
            versions[sample.schema_version] += 1
            yield sample

    samples = write_trace(to, noted(), schema_version=schema_version)
    document = {
        "samples": samples,
        "from": dict(sorted(versions.items())),
        "schema_version": schema_version,
        "file": str(to),
    }
    held = ", ".join(f"{count} of version {version}" for version, count in sorted(versions.items()))
    done = f"OK: {counted(samples, 'sample')} ({held or 'none'}) to {to}, version {schema_version}"
    return Result(document, [done])
