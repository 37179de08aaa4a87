"""`mmpack view TRACE`: samples and trajectories as one page, or as a figure; `mmpack view plan.json`: a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmpack.cli.output import JsonOption, OutOption, emit, writable
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
            metavar="TRACE", help="A .jsonl, .jsonl.zst or .parquet trace, or a plan's .json."
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--html",
            metavar="FILE",
            callback=writable,
            help="The page; NAME.html of NAME.jsonl here, if neither this nor --png is given.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", callback=writable, help="Write a figure to FILE."),
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this sample; repeat it for more.")
    ] = None,
    trajectory: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Only this trajectory's samples; repeat it for more."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many samples: of a page 100, of a figure 8."),
    ] = None,
    media_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            exists=True,
            help="The folder that the sources of pictures and videos begin in.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A tokenizer's folder or hub name: text for the ids."),
    ] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> int:
    """Draw trajectories: screens with clicks and boxes, tokens by what they are, rewards and costs. Or draw a plan."""
    if trace.suffix.lower() == ".json":
        unused: dict[str, Any] = {"--png": png, "--sample": sample, "--trajectory": trajectory}
        unused |= {"--limit": limit, "--media-root": media_root, "--tokenizer": tokenizer}
        return _plan(trace, html, unused, as_json, out)
    from mmpack.schema.trace import FORMATS, read_trace
    from mmpack.view import FIGURE_LIMIT, LIMIT
    from mmpack.view.trace.choose import checked_options, choose
    from mmpack.view.trace.figure import figure
    from mmpack.view.trace.page import page

    if html is None and png is None:
        kind = next((k for k in FORMATS if trace.name.endswith(k)), "")
        html = writable(Path(f"{trace.name.removesuffix(kind) or 'trace'}.html"))
    for target in (html, png, out):
        _refuse_the_trace(target, trace)
    _refuse_one_file_for_two(html, png, out)
    if png is not None and png.suffix.lower() != ".png":
        raise ArgumentError(f"view: --png {png.name!r:.60} is no .png. Fix: a name ending in .png")
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
        raise ArgumentError(f"view: {trace} holds no sample. Fix: see why its writer wrote none")
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
    emit(document, _lines(document), as_json, out)
    return 0


def _plan(
    path: Path, html: Path | None, unused: dict[str, Any], as_json: bool, out: Path | None
) -> int:
    """A lane for each rank."""
    from mmpack.planning.planned import Plan
    from mmpack.view.plan import page

    for name, value in unused.items():
        if value:
            raise ArgumentError(
                f"view: {name} is of traces, {path.name!r:.60} is a plan. Fix: leave it out"
            )
    page_file = html or Path(f"{path.stem}.html")
    writable(page_file)
    for target in (page_file, out):
        _refuse_the_trace(target, path)
    _refuse_one_file_for_two(page_file, out)
    plan = Plan.load(path)
    write_text(page_file, page(plan, path.name))
    document = {
        "plan": str(path),
        "bins": len(plan.bins),
        "ranks": len(plan.ranks),
        "html": str(page_file),
    }
    lines = [f"{len(plan.bins)} micro-batches on {len(plan.ranks)} ranks drawn", str(page_file)]
    emit(document, lines, as_json, out)
    return 0


def _refuse_the_trace(target: Path | None, trace: Path) -> None:
    """A file that is to be written must not be the one that is read."""
    if target is not None and target.exists() and trace.exists() and target.samefile(trace):
        raise ArgumentError(f"view: {target.name!r:.60} is the trace itself. Fix: another file")


def _refuse_one_file_for_two(*targets: Path | None) -> None:
    """Of two documents in one file only the last would be left. Devices take both."""
    named = [t.resolve() for t in targets if t is not None and (t.is_file() or not t.exists())]
    for k, path in enumerate(named):
        if path in named[:k]:
            raise ArgumentError(
                f"view: {path.name!r:.60} is named for two documents. Fix: a file for each"
            )


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
        lines.append(f"{len(missing)} media without their picture, e.g. {name}: {why}")
    return lines
