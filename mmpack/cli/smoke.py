"""`mmpack smoke`: one GRPO step on geometry problems or clips, from media to the optimizer, every check printed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mmpack.cli.output import HtmlOption, JsonOption, OutOption, emit
from mmpack.errors import require
from mmpack.parity.fixes import Injected

# those of an engine are put into the rollout's side, or need one whose positions are its own
Cause = Literal[Injected, "dtype", "position_rule", "stale_weights"]


def command(
    data: Annotated[
        str | None,
        typer.Option(help="Geometry3K: a folder, a parquet file or a hub name. Default: drawn."),
    ] = None,
    video: Annotated[
        bool, typer.Option("--video", help="Clips, whose questions need the order in time.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint's name or path. Default: tiny and random.")
    ] = None,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="What samples: generate, or a real vLLM engine on this machine."),
    ] = "transformers",
    n: Annotated[int, typer.Option(min=1, help="Responses a prompt.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, sampling and order.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 24,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampler.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of the engine's sampler.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first problems alone.")] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Keep rollout.jsonl and train.jsonl here. Default: a temporary folder, removed.",
        ),
    ] = None,
    inject: Annotated[
        Cause | None,
        typer.Option(help="Break one side on purpose; the run must name the cause."),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Then take steps, and check that the reward rises.")
    ] = False,
    negate_advantages: Annotated[bool, typer.Option("--negate-advantages", hidden=True)] = False,
    as_json: JsonOption = False,
    out: OutOption = None,
    html: HtmlOption = None,
) -> int:
    """Take one GRPO step on geometry problems, or on clips, and check every stage of it. Exits 1 if a check fails."""
    for package in ("torch", "transformers", "PIL"):
        require(package, "smoke", "mmpack smoke")
    if video:
        require("av", "video", "mmpack smoke --video")
    from mmpack.smoke.job import SmokeOptions
    from mmpack.smoke.run import run

    options = SmokeOptions(
        data=data,
        video=video,
        model=model,
        engine=engine,
        n=n,
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        limit=limit,
        workdir=workdir,
        html=html,
        inject=inject,
        learn=learn,
        negate_advantages=negate_advantages,
    )
    # with --json, stdout is the document alone
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report = run(options)
    emit(report.to_dict(), [], as_json, out)
    return int(report.exit_code)
