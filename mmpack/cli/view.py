"""`mmpack view FILE`: a trace as one page, or as a figure; a trace's samples as a pack; a plan; a parity report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmpack.cli.output import JsonOption, OutOption, emit, writable
from mmpack.cli.view_files import Files, draw_document, draw_pack
from mmpack.errors import ArgumentError
from mmpack.errors import require as require_extra
from mmpack.files import replaced, write_text
from mmpack.progress import tracked

if TYPE_CHECKING:
    from mmpack.view.trace.choose import Chosen


def command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .jsonl, .jsonl.zst or .parquet trace; the .json of a plan or of a parity report.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--html",
            metavar="FILE",
            callback=writable,
            help="The page to write. Default without --png: NAME.html here, for NAME.jsonl.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", callback=writable, help="Write a figure to FILE."),
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack", help="Draw the samples as one pack, with shared prefixes.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="plan.json", help="A plan of the trace: draw its micro-batch --bin."),
    ] = None,
    bin: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which micro-batch of --plan.")
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Draw only this sample; repeat the option for more."),
    ] = None,
    trajectory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Draw only this trajectory's samples; repeat the option for more."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Draw at most N samples. Default: 100 on a page, 8 in a figure.",
        ),
    ] = None,
    media_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            exists=True,
            help="The folder of the trace's pictures and videos.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A tokenizer's folder or hub name, to show ids as text."),
    ] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Draw a trace, a pack, a plan or a parity report, as a page or a figure.

    A trace shows screens with clicks and boxes, tokens by role, rewards and shared prefixes.
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
    return _draw_trace(files, sample, trajectory, limit, media_root, tokenizer, as_json)


def _refuse(path: Path, options: dict[str, Any], of: str = "of traces") -> None:
    for name, value in options.items():
        if value:
            what = f", {path.name!r:.60} is a document" if of == "of traces" else ""
            raise ArgumentError(f"view: {name} is {of}{what}. Fix: leave it out")


def _draw_trace(
    files: Files,
    sample: list[str] | None,
    trajectory: list[str] | None,
    limit: int | None,
    media_root: Path | None,
    tokenizer: str | None,
    as_json: bool,
) -> int:
    """A page of samples, and a figure of the first of them."""
    from mmpack.schema.trace import read_trace
    from mmpack.view import FIGURE_LIMIT, LIMIT
    from mmpack.view.trace.choose import checked_options, choose
    from mmpack.view.trace.figure import figure
    from mmpack.view.trace.page import page

    trace, html, png = files.read, files.html, files.png
    reader = read_trace(trace)
    words = None
    if tokenizer is not None:
        require_extra("transformers", "hf", "--tokenizer")
        from mmpack.adapters.transformers.tokenizer import load_tokenizer

        words = load_tokenizer(tokenizer)
    options = checked_options("view", media_root, None, words, trace.name)
    most = limit or max(LIMIT if html else 0, FIGURE_LIMIT if png else 0)
    chosen = choose(tracked(reader, "reading"), "view", most, sample or (), trajectory or ())
    if not chosen.samples:
        raise ArgumentError(f"view: {trace} holds no samples. Fix: check why its writer wrote none")
    document: dict[str, Any] = _counts(trace, chosen)
    missing: dict[str, str] = {}
    if html is not None:
        text, missing = page(chosen.samples, chosen.note, **options)
        write_text(html, text)
        document["html"] = str(html)
    if png is not None:
        some = choose(chosen.samples, "view", limit or FIGURE_LIMIT)
        data, lacking = figure(some.samples, some.note or chosen.note, **options)
        missing |= lacking
        with replaced(png, "view", ArgumentError) as file:
            file.write(data)
        document["png"] = str(png)
    document["drawn_without_picture"] = missing
    emit(document, _lines(document), as_json, files.out)
    return 0


def _counts(trace: Path, chosen: Chosen) -> dict[str, Any]:
    samples = chosen.samples
    return {
        "trace": str(trace),
        "samples": len(samples),
        "more_samples": chosen.more,
        "trajectories": len({s.trajectory_id for s in samples} - {None}),
        "tokens": sum(map(len, samples)),
        "loss_tokens": sum(s.num_loss_tokens for s in samples),
        "html": None,
        "png": None,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    more = " (there are more: --limit, --sample, --trajectory)" if document["more_samples"] else ""
    lines = [f"{document['samples']} samples drawn{more}"]
    lines += [f"{document[kind]}" for kind in ("html", "png") if document[kind]]
    missing = document["drawn_without_picture"]
    if missing:
        name, why = next(iter(missing.items()))
        lines.append(f"{len(missing)} media without their picture, e.g. {name:.120}: {why:.300}")
    return lines
