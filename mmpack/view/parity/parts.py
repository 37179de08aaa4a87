"""The parts of a parity report: verdict, causes, what was not compared, a card for each sample that differs, the rest.

Both sides of a sample are strips on one scale, so they are aligned up to the first difference, which a line marks. Of
media there is the picture where its file is at hand, else its shape, with the grid that the processor laid over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.parity.causes.pair import Pair, Side
from mmpack.parity.drift_traces import trace_drift
from mmpack.parity.report import by_cause, counted, evidence_of
from mmpack.schema.media import Medium
from mmpack.view import parts as draw
from mmpack.view.bars import histogram
from mmpack.view.forest import pieces
from mmpack.view.media import Find, finder, thumbnail
from mmpack.view.parity.drift import by_token, drift_of, drift_parts
from mmpack.view.parity.frame_viewer import FrameViewer

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift
    from mmpack.parity.report import Finding, ParityReport

CARDS, FIGURE_CARDS = 20, 8  # samples drawn on a page, in a figure
ROWS = 200  # findings listed of samples that are not drawn
LINES = 12  # findings listed of one sample
LEFT, HIGH, STEP = 100.0, 20.0, 26.0  # room for names; a strip, and it with its gap
PIECES = 400  # spans drawn of one side; beyond it they are thinner than a pixel
BEFORE, AFTER = 4, 14  # tokens shown around the first difference
CONTEXT = 24  # tokens of text before and after it
SHOWN = 4  # media of a sample
LONGEST, CELLS = 220, 80  # pixels of a thumbnail's longer side; its grid lines along one side


def report_parts(
    report: ParityReport,
    media_root: str | os.PathLike[str] | None = None,
    pictures: Mapping[str, np.ndarray] | None = None,
    decode: Decode | None = None,
    train_logprobs: Mapping[str, np.ndarray] | None = None,
    drift: LogprobDrift | None = None,
    samples: int = CARDS,
    note: str = "",
) -> list[draw.Part]:
    """What a page, a notebook and a figure show.

    Args: `media_root`: folder below which media are opened. `pictures`: content_hash to pixels, uint8 [h, w, 3], of a
        video its sampled frames, [n, h, w, 3]. `decode`: ids to text. `train_logprobs`: sample_id to the trainer's
        logprobs [n], where its trace doesn't hold them. `drift`: of all samples, where it is known; else that of the
        samples drawn. `samples`: how many to draw. `note`: a line below the verdict.
    """
    find, viewer = finder(media_root, pictures), FrameViewer(media_root, pictures)
    of: dict[str, list[Finding]] = {}
    for finding in report.findings:
        of.setdefault(finding.sample_id, []).append(finding)
    pairs = {left.sample_id: Pair(left, right) for left, right in report.pairs[:samples]}
    drifts = {
        name: drift_of(pair, (train_logprobs or {}).get(name)) for name, pair in pairs.items()
    }
    cards = [
        draw.Card(list(_card(name, pair, of.get(name, []), drifts[name], find, viewer, decode)))
        for name, pair in pairs.items()
    ]
    key = [(f"mm-{k}", "unclaimed placeholder" if k == "placeholder" else k) for k in KINDS]
    drawn: list[draw.Part] = [draw.Heading("Samples"), draw.Key(key), *cards] if cards else []
    return [
        *_head(report, note),
        *_logprobs([d for d in drifts.values() if isinstance(d, np.ndarray)]),
        *_told_apart(report, drift, samples, train_logprobs),
        *drawn,
        *_rest(report, [f for f in report.findings if f.sample_id not in pairs]),
    ]


def _head(report: ParityReport, note: str) -> Iterator[draw.Part]:
    """The verdict, the causes with their fixes, and what was not compared."""
    differs = "Layouts differ" if report.total_findings else "Not compared"
    yield draw.Heading("Same layout" if report.ok else differs, 1, "good" if report.ok else "bad")
    yield draw.Line(report.summary())
    if note:
        yield draw.Line(note, soft=True)
    if report.causes:
        fixes = {finding.cause: finding.fix for finding in reversed(report.findings)}
        rows = [(_cause(c), count, fixes.get(c, "")) for c, count in report.causes.items()]
        yield draw.Heading("Causes")
        yield draw.Table(("cause", "samples", "fix"), rows, "mm-rows")
    if report.not_compared:
        title = f"{counted(len(report.not_compared), 'field')} not compared in every sample"
        lacking = draw.Table(("field", "why"), list(report.not_compared.items()), "mm-rows")
        unmet = set(report.require) & report.not_compared.keys()
        yield draw.Folded(title, [lacking], open=bool(unmet))


def _cause(name: str) -> draw.Styled:
    return draw.Styled(name, style="mm-cause")


def _told_apart(
    report: ParityReport,
    drift: LogprobDrift | None,
    samples: int,
    train_logprobs: Mapping[str, np.ndarray] | None,
) -> list[draw.Part]:
    note = "all samples whose logprobs can be compared"
    if drift is None and report.pairs:
        rollout, train = zip(*report.pairs[:samples], strict=True)
        drift, _ = trace_drift(rollout, train, train_logprobs)
        note = "the samples drawn below"
    return [] if drift is None else drift_parts(drift, note)


def _logprobs(drifts: list[np.ndarray]) -> list[draw.Part]:
    """Histograms of train − rollout, and of the ratios that they are logs of."""
    if not drifts:
        return []
    values = np.concatenate(drifts)
    with np.errstate(over="ignore"):
        ratios = np.exp(values)
    named = {"train − rollout logprob": values, "ratio exp(train − rollout)": ratios}
    histograms = [histogram(found, name) for name, found in named.items()]
    count = f"of the {len(drifts)} samples drawn below that have logprobs of the same tokens"
    return [draw.Heading("Logprobs"), draw.Grid(histograms), draw.Line(count, soft=True)]


# ---- one sample ----------------------------------------------------------------------------------


def _card(
    name: str,
    pair: Pair,
    findings: list[Finding],
    drift: np.ndarray | str | None,
    find: Find,
    viewer: FrameViewer,
    decode: Decode | None,
) -> Iterator[draw.Part]:
    at, what = first_difference(pair)
    causes = dict.fromkeys(finding.cause for finding in findings)
    yield draw.Heading(f"sample {name}", 3, tags=list(map(_cause, causes)))
    yield _strips(pair, at)
    if at is not None:
        yield draw.Line(f"first difference: token {at} ({what})", soft=True)
        yield _zoom(pair, at, what, decode)
        yield draw.Folded("", [_around(side, at, decode) for side in pair.sides])
    yield draw.Folded("", [*_media(pair, find), *viewer.parts(pair, findings)])
    yield from _by_cause(findings[:LINES], ("field", "at", "rollout", "train"), _row)
    if len(findings) > LINES:
        more = counted(len(findings) - LINES, "more finding")
        yield draw.Line(f"and {more} of this sample", soft=True)
    if isinstance(drift, np.ndarray):
        yield from by_token(drift)
    elif drift:
        yield draw.Line(drift, soft=True)


def _strips(pair: Pair, at: int | None) -> draw.Drawing:
    """Both sides from the first token to the last, one rectangle per span."""
    scale = (draw.WIDE - LEFT) / max(1, *map(len, pair.sides))
    shapes: list[draw.Shape] = []
    for k, side in enumerate(pair.sides):
        y, of = k * STEP + 4, kinds(side)
        shapes.append(draw.Word(0, y + 15, f"{side.name} {len(side):,}", "mm-soft"))
        found = list(pieces(of))
        for a, b in found[:PIECES]:
            kind = KINDS[of[a]]
            about = f"{side.name}: {kind} [{a}, {b}), {b - a} tokens"
            width = max((b - a) * scale, 0.6)
            shapes.append(draw.Box(LEFT + a * scale, y, width, HIGH, f"mm-{kind}", about))
        if len(found) > PIECES:
            a = found[PIECES][0]
            about = f"{len(found) - PIECES} more spans"
            x, width = LEFT + a * scale, (len(side) - a) * scale
            shapes.append(draw.Box(x, y, width, HIGH, "mm-text", about))
    if at is not None:
        x = min(LEFT + at * scale, draw.WIDE - 1)
        shapes.append(draw.Stroke(x, 0, x, 2 * STEP + 2, "mm-mark"))
    label = f"spans of rollout (above) and train (below) of {pair.left.sample.sample_id}"
    return draw.Drawing(shapes, 2 * STEP + 2, label, style="mm-strip")


def _zoom(pair: Pair, at: int, what: str, decode: Decode | None) -> draw.Tokens:
    """One cell per token around the first difference, both sides aligned at it."""
    start = max(at - BEFORE, 0)
    indices = range(start, at + AFTER)
    differ = unlike(pair, start, at + AFTER, what)
    rows = [[draw.Cell(""), *(draw.Cell(str(i), "mm-at" if i == at else "") for i in indices)]]
    for side in pair.sides:
        of = kinds(side)
        cells = [_cell(side, of, i, differ[i - start], what, decode) for i in indices]
        rows.append([draw.Cell(side.name), *cells])
    return draw.Tokens(f"tokens around {at}", rows)


def _cell(
    side: Side, of: np.ndarray, i: int, differs: bool, what: str, decode: Decode | None
) -> draw.Cell:
    style = " mm-unlike" if differs else ""
    if i >= len(side):
        return draw.Cell("–", f"mm-none{style}", "")
    kind, one, below = KINDS[of[i]], int(side.ids[i]), ""
    shown = kind if side.placeholder[i] else decode([one]) if decode else str(one)
    if what == "positions" and side.sample.position_ids is not None:
        below = ", ".join(map(str, side.sample.position_ids[:, i].tolist()))
    text = shown if len(shown) <= 14 else f"{shown[:13]}…"
    return draw.Cell(text, f"mm-{kind}{style}", f"token {i}: id {one}, {kind}", below)


def _around(side: Side, at: int, decode: Decode | None) -> draw.Line:
    """The text (ids without a decoder) around the first difference, which stands at a mark."""
    middle = min(at, len(side))
    before = decoded(side, max(at - CONTEXT, 0), middle, decode)
    after = decoded(side, middle, min(at + CONTEXT, len(side)), decode)
    before = f"{'…' if at > CONTEXT else ''}{before}"
    after = f"{after}{'…' if at + CONTEXT < len(side) else ''}"
    mark = draw.Styled("│", "mark")
    return draw.Line(
        [draw.Styled(side.name, style="mm-note mm-side"), draw.Styled(before, "code"), mark, draw.Styled(after, "code")]
    )  # fmt: skip


def _media(pair: Pair, find: Find) -> list[draw.Part]:
    """The media of both sides, those of one index side by side."""
    most = max(len(side.sample.media) for side in pair.sides)
    shown = [
        _figure(side, side.sample.media[i], i, find)
        for i in range(min(most, SHOWN))
        for side in pair.sides
        if i < len(side.sample.media)
    ]
    more = [draw.Line(f"{most - SHOWN} more media", soft=True)] if most > SHOWN else []
    return [draw.Grid(shown, "mm-pictures"), *more] if shown else []


def _figure(side: Side, medium: Medium, index: int, find: Find) -> draw.Figure:
    t, h, w = medium.grid_thw
    merge = side.family.spatial_merge_size
    rows, columns = max(h // merge, 1), max(w // merge, 1)
    pixels, note = find(medium)
    label = f"{medium.modality} with its grid of {rows} × {columns}"
    lattice = draw.Lattice(columns, rows, CELLS)
    drawing = thumbnail(medium, pixels, LONGEST, label, columns / rows, 20.0, lattice)
    size = "" if medium.size is None else f"{medium.size[0]} × {medium.size[1]} px, "
    times = f"{t} × " if t > 1 else ""
    grid = f"{size}grid {times}{h // merge} × {w // merge} = {medium.num_tokens} tokens"
    return draw.Figure(f"{side.name} media[{index}]", drawing, f"{medium.media_id} {grid}", note)


# ---- findings ------------------------------------------------------------------------------------


def _by_cause(
    findings: list[Finding], head: tuple[str, ...], row: Callable[[Finding], tuple[Any, ...]]
) -> Iterator[draw.Part]:
    """Each cause: its evidence, its findings as a table, its fix."""
    for group in by_cause(findings):
        why = dict.fromkeys(part for text in evidence_of(group) for part in text.split("; "))
        yield draw.Line([_cause(group[0].cause), " ", "; ".join(why)])
        yield draw.Table(head, [row(finding) for finding in group], "mm-rows")
        yield draw.Line([draw.Styled("Fix: ", "b"), group[0].fix])


def _row(finding: Finding) -> tuple[Any, ...]:
    place = "" if finding.index is None else str(finding.index)
    if finding.span is not None:
        place += f" [{finding.span[0]}, {finding.span[1]})"
    return (finding.field, place, finding.left, finding.right)


def _rest(report: ParityReport, rest: Sequence[Finding]) -> Iterator[draw.Part]:
    """Findings of samples that are not drawn, and how many are not listed at all."""
    left_out = report.total_findings - len(report.findings) + max(len(rest) - ROWS, 0)
    if rest:
        head = ("sample", "field", "at", "rollout", "train")
        yield draw.Heading("Further findings")
        yield from _by_cause(list(rest[:ROWS]), head, lambda f: (f.sample_id, *_row(f)))
    if left_out:
        yield draw.Line(f"{left_out} more findings are not shown.", soft=True)


Decode = Callable[[Sequence[int]], str]
KINDS = ("text", "image", "video", "loss", "observation", "placeholder", "audio")
TEXT, IMAGE, VIDEO, LOSS, OBSERVATION, PLACEHOLDER, AUDIO = range(7)
_OF_MODALITY = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


def kinds(side: Side) -> np.ndarray:
    """int8 [L]: index into KINDS; `placeholder`: no span claims it, or one in the loss."""
    out = np.full(len(side), TEXT, dtype=np.int8)
    out[side.observed] = OBSERVATION
    out[side.loss] = LOSS
    out[side.placeholder] = PLACEHOLDER
    for span in side.sample.modality_spans:
        inside = slice(span.start, span.stop)
        out[inside] = np.where(
            side.placeholder[inside] & ~side.loss[inside],
            _OF_MODALITY[span.modality],
            out[inside],
        )
    return out


def first_difference(pair: Pair) -> tuple[int | None, str]:
    """The first token that has another id, else another position, else is in only one loss; and which of these."""
    left, right = pair.sides
    shorter = min(len(left), len(right))
    unlike = left.ids[:shorter] != right.ids[:shorter]
    if unlike.any() or len(left) != len(right):
        return (int(np.argmax(unlike)) if unlike.any() else shorter), "ids"
    a, b = left.sample.position_ids, right.sample.position_ids
    if a is not None and b is not None and a.shape == b.shape and (a != b).any():
        return int(np.argmax((a != b).any(axis=0))), "positions"
    for mine, other, what in (
        (left.loss, right.loss, "loss"),
        (kinds(left), kinds(right), "spans"),
    ):
        if (mine != other).any():
            return int(np.argmax(mine != other)), what
    return None, ""


def unlike(pair: Pair, start: int, stop: int, what: str) -> np.ndarray:
    """bool [stop - start]: token differs in id or kind, or one side lacks it; in `what` positions, by these too."""
    out = np.zeros(stop - start, dtype=bool)
    left, right = pair.sides
    shorter, longer = sorted((len(left), len(right)))
    out[max(shorter - start, 0) : max(longer - start, 0)] = True
    both = slice(start, min(stop, shorter))
    differ = (left.ids[both] != right.ids[both]) | (kinds(left)[both] != kinds(right)[both])
    a, b = left.sample.position_ids, right.sample.position_ids
    if what == "positions" and a is not None and b is not None:
        differ |= (a[:, both] != b[:, both]).any(axis=0)
    out[: len(differ)] |= differ
    return out


def decoded(side: Side, start: int, stop: int, decode: Decode | None) -> str:
    """Tokens [start, stop) as text, else as ids; runs of placeholders as their count."""
    parts = []
    marked = side.placeholder[start:stop]
    for a, b in pieces(marked):
        ids = side.ids[start + a : start + b].tolist()
        if marked[a]:
            run = int(np.searchsorted(side.runs.starts, start + a, side="right")) - 1
            parts.append(f"[{side.runs.modalities[run]} × {b - a}]")
        else:
            parts.append(decode(ids) if decode else " ".join(map(str, ids)))
    return (" " if decode is None else "").join(parts)
