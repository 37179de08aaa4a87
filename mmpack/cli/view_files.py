"""What `mmpack view` draws: a trace, a pack of its samples, a plan, a parity report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpack.cli.output import check_writable, emit, refuse_shared
from mmpack.errors import ArgumentError, require
from mmpack.files import replaced, write_text
from mmpack.progress import tracked

if TYPE_CHECKING:
    from mmpack.planning.planned import Plan
    from mmpack.schema.sample import Sample

MAX_FILE = 2**30  # bytes
WRITTEN = "what Plan.save or `mmpack parity --out` wrote"
MORE = " (there are more: --limit, --sample, --trajectory)"
TRACES = (".jsonl", ".jsonl.zst", ".parquet", ".json")


@dataclass(frozen=True)
class Files:
    """What is read and what is written; at least one of `html` and `png`."""

    read: Path
    html: Path | None
    png: Path | None
    out: Path | None

    @classmethod
    def checked(cls, read: Path, html: Path | None, png: Path | None, out: Path | None) -> Files:
        """With a page's name where none is given. Raises: ArgumentError."""
        if html is None and png is None:
            kind = next((k for k in TRACES if read.name.lower().endswith(k)), "")
            html = Path(f"{read.name[: len(read.name) - len(kind)] or 'trace'}.html")
            check_writable(html)
            refuse_shared("view", html, out)
        return cls(read, html, png, out)

    def write(self, page: str | None, figure: bytes | None) -> dict[str, str]:
        """Each is written whole or not at all; their names."""
        done = {}
        if self.html is not None and page is not None:
            write_text(self.html, page)
            done["html"] = str(self.html)
        if self.png is not None and figure is not None:
            with replaced(self.png, "view", ArgumentError) as file:
                file.write(figure)
            done["png"] = str(self.png)
        return done


def draw_document(files: Files, as_json: bool) -> int:
    """A plan or a parity report, by what the file holds."""
    from mmpack.parity.saved import is_report, report_of

    document = _parsed(files.read)
    if is_report(document):
        report, drift = report_of(document, f"view: {files.read}")
        return _draw_report(files, report, drift, as_json)
    from mmpack.planning.planned import FORMAT, Plan

    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ArgumentError(
            f"view: {files.read} is neither a plan nor a parity report. Fix: name {WRITTEN}"
        )
    return _draw_plan(files, Plan.load(files.read), as_json)


def draw_trace(
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

    reader = read_trace(files.read)
    words = None
    if tokenizer is not None:
        require("transformers", "hf", "--tokenizer")
        from mmpack.adapters.transformers.load import load_tokenizer

        words = load_tokenizer(tokenizer)
    options = checked_options("view", media_root, None, words, files.read.name)
    most = limit or max(LIMIT if files.html else 0, FIGURE_LIMIT if files.png else 0)
    chosen = choose(tracked(reader, "reading"), "view", most, sample or (), trajectory or ())
    samples = chosen.samples
    if not samples:
        raise ArgumentError(
            f"view: {files.read} holds no samples. Fix: check why its writer wrote none"
        )
    text, data = None, None
    missing: dict[str, str] = {}
    if files.html is not None:
        text, missing = page(samples, chosen.note, options)
    if files.png is not None:
        some = choose(samples, "view", limit or FIGURE_LIMIT)
        data, lacking = figure(some.samples, some.note or chosen.note, options)
        missing |= lacking
    done = files.write(text, data)
    document: dict[str, Any] = {
        "trace": str(files.read),
        "samples": len(samples),
        "more_samples": chosen.more,
        "trajectories": len({s.trajectory_id for s in samples} - {None}),
        "tokens": sum(map(len, samples)),
        "loss_tokens": sum(s.num_loss_tokens for s in samples),
        "html": None,
        "png": None,
        **done,
        "drawn_without_picture": missing,
    }
    lines = [f"{len(samples)} samples drawn{MORE if chosen.more else ''}", *done.values()]
    if missing:
        name, why = next(iter(missing.items()))
        lines.append(f"{len(missing)} media without their picture, e.g. {name:.120}: {why:.300}")
    emit(document, lines, as_json, files.out)
    return 0


def draw_pack(
    files: Files,
    sample: list[str] | None,
    trajectory: list[str] | None,
    limit: int | None,
    plan: Path | None,
    number: int | None,
    as_json: bool,
) -> int:
    """The chosen samples in one pack, or a micro-batch of a plan as it says."""
    from mmpack.packing.pack import pack
    from mmpack.schema.trace import read_trace
    from mmpack.view import LIMIT, html, png
    from mmpack.view.trace.choose import choose

    share, more, name = True, False, files.read.name
    reader = tracked(read_trace(files.read), "reading")
    if plan is not None and number is not None:
        samples, share = _of_plan(plan, list(reader), number)
        name = f"{name}, micro-batch {number} of {plan.name}"
    else:
        chosen = choose(reader, "view", limit or LIMIT, sample or (), trajectory or ())
        samples, more = chosen.samples, chosen.more
        name += f", the first {len(samples)} samples" if more else ""
    if not samples:
        raise ArgumentError(f"view: {name} holds no samples. Fix: name one that does")
    batch = pack(samples, share_prefix=share)
    page = html(batch, title=name) if files.html else None
    done = files.write(page, png(batch, title=name) if files.png else None)
    document: dict[str, Any] = {
        "trace": str(files.read),
        "samples": len(samples),
        "more_samples": more,
    }
    document |= {"rows": batch.stats["tokens"], "rows_alone": batch.stats["tokens_unshared"]} | done
    words = f"{len(samples)} samples drawn in {document['rows']:,} rows"
    words += MORE if more else ""
    emit(document, [words, *done.values()], as_json, files.out)
    return 0


def _of_plan(path: Path, samples: list[Sample], number: int) -> tuple[list[Sample], bool]:
    """The samples of a micro-batch, and whether it shares prefixes. Raises: PlanError for a plan of other samples."""
    from mmpack.planning.planned import Plan

    plan = Plan.load(path, samples)
    if number >= len(plan.bins):
        raise ArgumentError(
            f"view: --bin {number} is not in {path.name!r:.60}. Fix: pass 0 to {len(plan.bins) - 1}"
        )
    return [samples[i] for i in plan.bins[number]], plan.share[number]


def _draw_plan(files: Files, plan: Plan, as_json: bool) -> int:
    """A lane for each rank."""
    from mmpack.view import html, png

    name = files.read.name
    page = html(plan, title=name) if files.html else None
    done = files.write(page, png(plan, title=name) if files.png else None)
    document: dict[str, Any] = {
        "plan": str(files.read),
        "bins": len(plan.bins),
        "ranks": len(plan.ranks),
    } | done
    lines = [f"{len(plan.bins)} micro-batches on {len(plan.ranks)} ranks drawn", *done.values()]
    emit(document, lines, as_json, files.out)
    return 0


def _draw_report(files: Files, report: Any, drift: Any, as_json: bool) -> int:
    """Verdict, causes and findings; samples are in the traces alone."""
    from mmpack.view import png
    from mmpack.view.pages import page
    from mmpack.view.parity.parts import report_parts

    note = "This file holds no samples; `mmpack parity A B --html FILE` draws those, too."
    parts = report_parts(report, drift=drift, note=note)
    html = page("mmpack parity", parts) if files.html else None
    done = files.write(html, png(report, drift=drift) if files.png else None)
    found = {"ok": report.ok, "compared": report.compared, "findings": report.total_findings}
    emit(
        {"report": str(files.read)} | found | done,
        [report.summary(), *done.values()],
        as_json,
        files.out,
    )
    return 0


def _parsed(path: Path) -> Any:
    """The JSON of a file. Raises: ArgumentError where it holds none."""
    from mmpack.schema.saved import read_json

    try:
        return read_json(path, MAX_FILE)
    except OSError as error:
        raise ArgumentError(
            f"view: {path} can't be read: {error.strerror}. Fix: name a trace, or {WRITTEN}"
        ) from None
    except ValueError as error:
        raise ArgumentError(
            f"view: {path} holds no JSON that can be read ({error}). Fix: name a trace, or {WRITTEN}"
        ) from None
