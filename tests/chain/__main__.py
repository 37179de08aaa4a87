"""`PYTHONPATH=tests python -m chain`: a step of one model in every layout, stage by stage, forward and backward."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import mmpack.cli.main
from mmpack.cli.output import HtmlOption, JsonOption, OutOption, emit, table
from mmpack.errors import require
from mmpack.files import write_text

ALL = "all"


def command(
    model: Annotated[str, typer.Option(help="qwen2.5-vl, qwen3-vl or qwen3.5.")] = "qwen2.5-vl",
    size: Annotated[
        str, typer.Option(help="tiny, or layer: a few layers with the widths of 7B and 8B models.")
    ] = "tiny",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    axis: Annotated[
        list[str] | None,
        typer.Option(help="An axis, or all. Default without --tp: those that one process can run."),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Ranks of tensor parallelism; with 2, FSDP2 is compared too."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for samples and advantages.")] = 0,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant", help="Run within mmpack.invariant, and check what must then be equal."
        ),
    ] = False,
    as_json: JsonOption = False,
    out: OutOption = None,
    html: HtmlOption = None,
) -> int:
    """Compare each stage of a step with each sample alone, in every layout. Exits 1 if one is beyond its bound.

    Caches and numbers of ranks are compared too, by --axis and --tp.
    """
    for package in ("torch", "transformers", "tokenizers", "PIL"):
        require(package, "hf", "chain")
    from chain.job import AXES, Options, chain

    options = Options(
        model=model,
        size=size,
        layers=layers,
        dtype=dtype,
        device=device,
        axes=list(AXES) if axis and ALL in axis else axes_of(axis, tp),
        tp=tuple(dict.fromkeys(tp)) if tp else (1, 2, 4),
        seed=seed,
        invariant=invariant,
    )
    # with --json, stdout holds only the document
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report = chain(options)
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes one speaks
        return 0
    if html is not None:
        from chain.page import page

        write_text(html, page(report))
    human: list[Any] = [
        table(*report.table(every_kind=False)),  # of kinds there are hundreds
        "Kinds of weight have rows only where they are beyond the contract; --out and --html show all of them.",
        *report.lines(),
        f"{report.seconds:.1f} s",
    ]
    emit(report.to_dict(), human, as_json, out)
    return 0 if report.ok else 1


def axes_of(axis: Sequence[str] | None, tp: Sequence[int] | None) -> list[str]:
    """The axes asked for; `--tp` asks for tensor_parallel, and for fsdp where 2 is one."""
    from chain.job import ONE_PROCESS

    ranks = ["tensor_parallel", *(["fsdp"] if 2 in tp else [])] if tp else []
    return list(dict.fromkeys([*(axis or (() if tp else ONE_PROCESS)), *ranks]))


def main(args: Sequence[str] | None = None) -> int:
    return mmpack.cli.main.main(args, command, "chain")


if __name__ == "__main__":
    sys.exit(main())
