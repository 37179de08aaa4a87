"""`mmpack view FILE`: a trace as one page, or as a figure; a trace's samples as a pack; a plan; a parity report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmpack.cli.output import (
    InputFolder,
    OutOption,
    OutputFile,
    Result,
    check_writable,
    refuse_shared,
    writable,
)
from mmpack.errors import ArgumentError, require
from mmpack.files import replaced, write_text
from mmpack.parity.report import counted
from mmpack.progress import tracked

MAX_FILE = 2**30  # bytes
WRITTEN = "what Plan.save or `mmpack parity --out` wrote"
MORE = " (there are more: --limit, --sample, --trajectory)"
TRACES = (".jsonl", ".jsonl.zst", ".parquet", ".json")


@dataclass(frozen=True)
class View:
    """What is read, which of its samples are drawn, and what is written: at least one of `html` and `png`."""

    read: Path
    html: Path | None
    png: Path | None
    sample: Sequence[str]
    trajectory: Sequence[str]
    limit: int | None


# what a file holds, as JSON and in lines, and what draws its page and its figure
Shown = tuple[dict[str, Any], list[str], Callable[[], str], Callable[[], bytes]]


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
    out: OutOption = None,
) -> Result:
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

    Examples:
        mmpack view rollout.jsonl --media-root screens
        mmpack view plan.json -o plan.html --png plan.png
        mmpack view report.json
        mmpack view rollout.jsonl --pack
    """
    if html is not None and html.suffix.lower() == ".png":
        raise ArgumentError(
            f"view: -o writes a page, {html.name!r:.60} is a picture's name. Fix: pass --png {html}"
        )
    if html is None and png is None:
        kind = next((k for k in TRACES if trace.name.lower().endswith(k)), "")
        html = Path(f"{trace.name[: len(trace.name) - len(kind)] or 'trace'}.html")
        check_writable(html)
        refuse_shared("view", html, out)
    view = View(trace, html, png, sample or (), trajectory or (), limit)
    of_pages = {"--media-root": media_root, "--tokenizer": tokenizer}
    of_traces = {"--sample": sample, "--trajectory": trajectory, "--limit": limit}
    if trace.suffix.lower() == ".json":
        refused = {"--pack": pack, "--plan": plan, "--bin": bin} | of_traces | of_pages
        _refuse(refused, f"of traces, {trace.name!r:.60} is a document")
        document, lines, page, figure = _document(view)
    elif pack or plan is not None or bin is not None:
        if (plan is None) != (bin is None):
            raise ArgumentError(
                "view: --plan and --bin must be passed together. Fix: pass both, or --pack"
            )
        _refuse(of_pages | (of_traces if plan is not None else {}), "of a trace's own page")
        document, lines, page, figure = _pack(view, plan, bin or 0)
    else:
        document, lines, page, figure = _trace(view, media_root, tokenizer)
    # both are drawn before one is written
    text, data = "" if html is None else page(), b"" if png is None else figure()
    if html is not None:
        write_text(html, text)
    if png is not None:
        with replaced(png, "view", ArgumentError) as file:
            file.write(data)
    files = {"html": html, "png": png}
    names = {kind: str(path) for kind, path in files.items() if path is not None}
    found = document | dict.fromkeys(files) | names
    return Result(found, [lines[0], *names.values(), *lines[1:]])


def _refuse(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value:
            raise ArgumentError(f"view: {name} is {why}. Fix: leave it out")


def _trace(view: View, media_root: Path | None, tokenizer: str | None) -> Shown:
    """A page of samples, and a figure of the first of them."""
    from mmpack.schema.trace import read_trace
    from mmpack.view import FIGURE_LIMIT, LIMIT
    from mmpack.view.trace.choose import checked_options, choose
    from mmpack.view.trace.figure import figure
    from mmpack.view.trace.page import page

    reader = read_trace(view.read)
    words = None
    if tokenizer is not None:
        require("transformers", "hf", "--tokenizer")
        from mmpack.adapters.transformers.load import load_tokenizer

        words = load_tokenizer(tokenizer)
    options = checked_options("view", media_root, None, words, view.read.name)
    most = view.limit or max(LIMIT if view.html else 0, FIGURE_LIMIT if view.png else 0)
    chosen = choose(tracked(reader, "reading"), "view", most, view.sample, view.trajectory)
    samples = _some(chosen.samples, str(view.read))
    text, data = "", b""
    missing: dict[str, str] = {}
    if view.html is not None:
        text, missing = page(samples, chosen.note, options)
    if view.png is not None:
        some = choose(samples, "view", view.limit or FIGURE_LIMIT)
        data, lacking = figure(some.samples, some.note or chosen.note, options)
        missing |= lacking
    lines = [f"{counted(len(samples), 'sample')} drawn{MORE if chosen.more else ''}"]
    if missing:
        name, why = next(iter(missing.items()))
        lines.append(f"{len(missing)} media without their picture, e.g. {name:.120}: {why:.300}")
    document = {
        "trace": str(view.read),
        "samples": len(samples),
        "more_samples": chosen.more,
        "trajectories": len({s.trajectory_id for s in samples} - {None}),
        "tokens": sum(map(len, samples)),
        "loss_tokens": sum(s.num_loss_tokens for s in samples),
        "drawn_without_picture": missing,
    }
    return document, lines, lambda: text, lambda: data


def _pack(view: View, plan: Path | None, number: int) -> Shown:
    """The chosen samples in one pack, or a micro-batch of a plan as it says."""
    from mmpack.packing.pack import pack
    from mmpack.planning.planned import Plan
    from mmpack.schema.trace import read_trace
    from mmpack.view import LIMIT, html, png
    from mmpack.view.trace.choose import choose

    share, more, name = True, False, view.read.name
    reader = tracked(read_trace(view.read), "reading")
    if plan is not None:
        samples = list(reader)
        planned = Plan.load(plan, samples)
        if number >= len(planned.bins):
            raise ArgumentError(
                f"view: --bin {number} is not in {plan.name!r:.60}. Fix: pass 0 to {len(planned.bins) - 1}"
            )
        samples, share = [samples[i] for i in planned.bins[number]], planned.share[number]
        name += f", micro-batch {number} of {plan.name}"
    else:
        chosen = choose(reader, "view", view.limit or LIMIT, view.sample, view.trajectory)
        samples, more = chosen.samples, chosen.more
        name += f", the first {counted(len(samples), 'sample')}" if more else ""
    batch = pack(_some(samples, name), share_prefix=share)
    rows = {"rows": batch.stats["tokens"], "rows_alone": batch.stats["tokens_unshared"]}
    counts = {"trace": str(view.read), "samples": len(samples), "more_samples": more}
    line = f"{counted(len(samples), 'sample')} drawn in {rows['rows']:,} rows{MORE if more else ''}"
    return counts | rows, [line], lambda: html(batch, title=name), lambda: png(batch, title=name)


def _some(samples: list[Any], name: str) -> list[Any]:
    if not samples:
        raise ArgumentError(f"view: {name} holds no samples. Fix: check why its writer wrote none")
    return samples


def _document(view: View) -> Shown:
    """A plan or a parity report, by what the file holds: a lane for each rank, or causes and findings."""
    from mmpack.parity.saved import is_report, report_of
    from mmpack.planning.planned import FORMAT, Plan
    from mmpack.schema.saved import read_json
    from mmpack.view import html, png
    from mmpack.view.pages import page
    from mmpack.view.parity.parts import report_parts

    name = view.read.name
    try:
        document = read_json(view.read, MAX_FILE)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it holds no JSON ({error})"
        raise ArgumentError(
            f"view: {view.read} can't be read: {why}. Fix: name a trace, or {WRITTEN}"
        ) from None
    if is_report(document):
        report, drift = report_of(document, f"view: {view.read}")
        note = "This file holds no samples; `mmpack parity A B --html FILE` draws those, too."
        found = {"ok": report.ok, "compared": report.compared, "findings": report.total_findings}
        return (
            {"report": str(view.read)} | found,
            [report.summary()],
            lambda: page("mmpack parity", report_parts(report, drift=drift, note=note)),
            lambda: png(report, drift=drift),
        )
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ArgumentError(
            f"view: {view.read} is neither a plan nor a parity report. Fix: name {WRITTEN}"
        )
    plan = Plan.load(view.read)
    return (
        {"plan": str(view.read), "bins": len(plan.bins), "ranks": len(plan.ranks)},
        [f"{len(plan.bins)} micro-batches on {len(plan.ranks)} ranks drawn"],
        lambda: html(plan, title=name),
        lambda: png(plan, title=name),
    )
