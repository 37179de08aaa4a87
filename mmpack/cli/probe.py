"""`mmpack probe A B`: at which module and token do two sides first differ?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmpack.cli.output import HtmlOption, InputFolder, OutputFile, Result, table
from mmpack.errors import ArgumentError
from mmpack.errors import require as require_extra
from mmpack.files import write_text

if TYPE_CHECKING:
    from mmpack.cli.probe_sides import Sides, Spec
    from mmpack.schema.sample import Sample

SHOWN = 12  # modules, on the screen


def command(
    a: str,
    b: Annotated[str | None, typer.Argument()] = None,
    trace: Path | None = None,
    media_root: InputFolder = None,
    draw_pixels: bool = False,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    tokens: str = "all",
    factor: float = 6.0,
    save: OutputFile = None,
    png: OutputFile = None,
    html: HtmlOption = None,
) -> Result:
    """Run the same samples through two sides and name the first module and token that differ.

    Args:
        a [A]: A side: FILE.probe, hf:DIR, tiny:FAMILY, vllm:DIR or python:MODULE:FUNCTION, with
            ?layout=…&dtype=…&attached=…&attention=…&temperature=…&kept_ids=…&device=….
        b [B]: The other side; leave it out with --save.
        trace [FILE]: The samples. Default for tiny models: drawn samples.
        media_root [DIR]: The folder of the trace's media files.
        draw_pixels: Use noise as pixels, the same every time.
        limit [N]: Use only the first N samples.
        tokens [WHICH]: all, loss, or indices: 0,5,-1.
        factor: How far a row may be off, as a multiple of its rounding noise.
        save [FILE.probe]: Record A to this file; compare nothing.
        png [FILE.png]: Write a figure of the error by layer.

    Examples:
        mmpack probe 'tiny:qwen2_5_vl?layout=padded' 'tiny:qwen2_5_vl?layout=packed'
        mmpack probe hf:checkpoint --trace train.jsonl --save a.probe
    """
    from mmpack.cli.probe_sides import Sides, parse

    specs = [parse(text) for text in (a, b) if text is not None]
    if (b is None) == (save is None):
        raise typer.BadParameter("Pass B, or --save FILE.probe to record A only.")
    # samples and tokens of a record were chosen when it was made
    if all(spec.kind == "file" for spec in specs):
        unused = {"--trace": trace, "--limit": limit, "--tokens": tokens != "all" or None}
        unused |= {"--draw-pixels": draw_pixels or None, "--media-root": media_root}
        for option, value in unused.items():
            if value is not None:
                raise typer.BadParameter(f"{option} is for sides that run; these are recorded.")
    require_extra("torch", "torch", "mmpack probe")
    from mmpack.probe import Contract, read_record, record, run
    from mmpack.probe.record import Record

    chosen = _tokens(tokens)
    contract = Contract(factor=factor)
    sides = Sides()
    try:
        samples = _samples(specs, sides, trace, media_root, draw_pixels, limit)
        ready = [  # what is missing is said before one runs
            read_record(spec.name) if spec.kind == "file" else sides.side(spec) for spec in specs
        ]
        records = [
            one if isinstance(one, Record) else record(one, samples, tokens=chosen) for one in ready
        ]
    finally:
        for close in sides.close:
            close()
    if save is not None:
        records[0].save(save)
        return Result({"saved": str(save), "about": records[0].about}, [f"saved {records[0]!r}"])
    report = run(records[0], records[1], contract=contract)
    given: dict[str, Any] = {"--trace": trace, "--media-root": media_root, "--limit": limit}
    given |= {"--tokens": None if tokens == "all" else tokens}
    given |= {"--factor": None if factor == Contract().factor else f"{factor:g}"}
    options = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    options += ["--draw-pixels"] * draw_pixels
    report.command = shlex.join(["mmpack", "probe", a, str(b), *options])
    if html is not None:
        write_text(html, report.to_html())
    if png is not None:
        report.to_png(png)
    rows = [
        (row.module, row.side, row.all.rows, row.all.max_error, row.all.worst)
        for row in report.modules[report.first.index_of_module :][:SHOWN]
    ] if report.first else []  # fmt: skip
    lines: list[Any] = report.lines(0)
    if rows:
        lines.append(table(("module", "side", "rows", "largest error", "of its bound"), rows))
    return Result(report.to_dict(), lines, 0 if report.ok else 1)


def _tokens(text: str) -> Any:
    if text in ("all", "loss"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--tokens {text!r:.40} is neither all, loss nor 0,5,-1."
        ) from None


def _samples(
    specs: list[Spec],
    sides: Sides,
    trace: Path | None,
    media_root: Path | None,
    draw_pixels: bool,
    limit: int | None,
) -> list[Sample]:
    """What the sides run; none where all are files."""
    if all(spec.kind == "file" for spec in specs):
        return []
    if trace is None:
        family = next((spec.family for spec in specs if spec.family), None)
        if family is None:
            raise typer.BadParameter("Pass --trace FILE, the samples that both sides run.")
        from mmpack.demo.probe_samples import probe_samples

        return probe_samples(family)[:limit]
    from mmpack.schema.trace import read_trace

    samples = list(read_trace(trace))[:limit]
    if draw_pixels:
        from mmpack.demo.probe_samples import draw_pixels as drawn

        drawn(samples)
    elif media_root is None:
        runs = any(spec.kind in ("hf", "tiny") for spec in specs)
        lacking = [(s, m) for s in samples for m in s.media if runs and m.pixel_values is None]
        for sample, medium in lacking:
            raise ArgumentError(
                f"probe: {sample.sample_id!r:.60}, {medium.media_id!r:.60} has no pixels. "
                "Fix: pass --media-root DIR, the folder of the trace's source files, or --draw-pixels"
            )
    else:
        from mmpack.cli.probe_sides import with_pixels

        processor = next((p for s in specs if (p := sides.processor(s)) is not None), None)
        if processor is None:
            raise typer.BadParameter(
                "--media-root needs a side hf:DIR, whose processor reads media."
            )
        with_pixels(samples, media_root, processor)
    return samples
