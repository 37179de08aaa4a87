"""A whole training step by mmpack and by its peers, on the device that is here.

    python -m benchmarks.step [--model M] [--workload W] [--peer P] …

Adds to benchmarks/results/step.json unless --out says else. A process that is stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import mmpack.cli.main
from mmpack.cli.output import JsonOption, Result, emit, writable
from mmpack.errors import require

ALL = "all"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "step.json"


def command(
    model: Annotated[
        list[str] | None, typer.Option(help="Shapes of this model. Default: all.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="geo, pictures, video or long. Default: all.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Who runs the step. Default: all that are installed."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", callback=writable, help="A report to add to, row by row."
        ),
    ] = RESULTS,
    again: Annotated[
        bool, typer.Option("--again", help="Measure rows that FILE has already.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=2, help="Steps to time, after the first.")] = 3,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers, for a quick try.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Use tiny models and samples.")] = False,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Use FSDP2 over torchrun's processes.")
    ] = False,
    liger: Annotated[
        bool, typer.Option("--liger", help="Use Liger's kernels in the layers.")
    ] = False,
    attention: Annotated[
        str | None, typer.Option(help="The attention backend of this run, as in MMPACK_ATTENTION.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Time forward and backward of a GRPO batch with each peer. Exits 1 if a check fails.

    Rows that are already in FILE are skipped.
    """
    for package in ("torch", "transformers"):
        require(package, "hf", "benchmarks.step")
    from benchmarks.step.models import MODELS
    from benchmarks.step.step import Options, peers_here, run
    from benchmarks.step.targets import targets
    from benchmarks.step.workloads import WORKLOADS

    if attention is not None:
        os.environ["MMPACK_ATTENTION"] = attention
    options = Options(
        models=_chosen(model, list(MODELS)),
        workloads=_chosen(workload, list(WORKLOADS)),
        peers=_chosen(peer, peers_here()),
        out=out,
        again=again,
        repeats=repeats,
        layers=layers,
        tiny=tiny,
        fsdp=fsdp,
        liger=liger,
        profile=profile,
    )
    # with --json, stdout holds only the document
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report = run(options, say=print)
    if os.environ.get("RANK", "0") == "0":  # of torchrun's processes one speaks
        emit(Result(report, map(str, targets(report["rows"]))), as_json, None)
    return int(any("error" in row and "did_not_run" in row for row in report["rows"]))


def _chosen(given: list[str] | None, every: list[str]) -> list[str]:
    return every if not given or given == [ALL] else list(dict.fromkeys(given))


def main(args: Sequence[str] | None = None) -> int:
    return mmpack.cli.main.main(args, command, "benchmarks.step")


if __name__ == "__main__":
    sys.exit(main())
