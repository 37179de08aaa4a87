"""`mmpack view FILE`: a trace as one page, or as a figure; a trace's samples as a pack; a plan; a parity report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmpack.cli.output import InputFolder, JsonOption, OutOption, OutputFile, writable
from mmpack.cli.view_files import Files, draw_document, draw_pack, draw_trace
from mmpack.errors import ArgumentError


def command(
    trace: Path,
    html: Annotated[Path | None, typer.Option("-o", "--html", callback=writable)] = None,
    png: OutputFile = None,
    pack: bool = False,
    plan: Path | None = None,
    bin: Annotated[int | None, typer.Option(min=0)] = None,
    sample: list[str] | None = None,
    trajectory: list[str] | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    media_root: InputFolder = None,
    tokenizer: str | None = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Draw a trace, a pack, a plan or a parity report, as a page or a figure.

    A trace shows screens with clicks and boxes, tokens by role, rewards and shared prefixes.

    Args:
        trace [FILE]: A .jsonl, .jsonl.zst or .parquet trace; the .json of a plan or of a parity report.
        html [FILE]: The page to write. Default without --png: NAME.html here, for NAME.jsonl.
        png [FILE.png]: Write a figure to FILE.
        pack: Draw the samples as one pack, with shared prefixes.
        plan [plan.json]: A plan of the trace: draw its micro-batch --bin.
        bin [N]: Which micro-batch of --plan.
        sample [ID]: Draw only this sample; repeat the option for more.
        trajectory [ID]: Draw only this trajectory's samples; repeat the option for more.
        limit [N]: Draw at most N samples. Default: 100 on a page, 8 in a figure.
        media_root [DIR]: The folder of the trace's pictures and videos.
        tokenizer [NAME]: A tokenizer's folder or hub name, to show ids as text.
    """
    files = Files.checked(trace, html, png, out)
    of_pages = {"--media-root": media_root, "--tokenizer": tokenizer}
    of_traces = {"--sample": sample, "--trajectory": trajectory, "--limit": limit}
    if trace.suffix.lower() == ".json":
        _refuse(trace, {"--pack": pack, "--plan": plan, "--bin": bin} | of_traces | of_pages)
        return draw_document(files, as_json)
    if pack or plan is not None or bin is not None:
        if (plan is None) != (bin is None):
            raise ArgumentError(
                "view: --plan and --bin must be passed together. Fix: pass both, or --pack"
            )
        _refuse(trace, of_pages | (of_traces if plan is not None else {}), "of a trace's own page")
        return draw_pack(files, sample, trajectory, limit, plan, bin, as_json)
    return draw_trace(files, sample, trajectory, limit, media_root, tokenizer, as_json)


def _refuse(path: Path, options: dict[str, Any], of: str = "of traces") -> None:
    for name, value in options.items():
        if value:
            what = f", {path.name!r:.60} is a document" if of == "of traces" else ""
            raise ArgumentError(f"view: {name} is {of}{what}. Fix: leave it out")
