"""The page of a packed or padded batch: what is in its rows, what sharing saves, its forest, its samples, figures.

Arrays are numpy, of all tokens of the samples, one sample after the other ([sum of L]), or of rows ([T]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.layout.runs import placeholder_runs
from mmpack.schema.spans import MODALITIES
from mmpack.view import parts as draw
from mmpack.view.bars import Saved, histogram, saved_parts, score_histograms
from mmpack.view.forest import forest_drawing, pieces

TEXT, LOSS = 0, len(MODALITIES) + 1  # kinds of tokens: between them those of MODALITIES
STYLES = ("mm-text", *(f"mm-{name}" for name in MODALITIES), "mm-loss")
NAMES = ("text", *MODALITIES, "in the loss (a line below)")
SAMPLES, LISTED = 32, 200  # drawn, and in tables
LETTER, LINE = 7.0, 26.0  # room for a letter of a name; height of a strip with its gap
LONGEST = 20  # letters of a name


@dataclass(frozen=True)
class Tokens:
    """Each token of the samples."""

    rows: np.ndarray  # int64: its row
    kind: np.ndarray  # int8: see STYLES
    loss: np.ndarray  # bool
    before: np.ndarray  # bool: an earlier sample has the row
    ends: np.ndarray  # int64 [B+1]: where samples begin and end


def batch_parts(batch: Any, title: str = "") -> list[draw.Part]:
    """What a page, a figure and a notebook show of a batch."""
    tokens = tokens_of(batch)
    stats, saved = batch.stats, saved_by(batch)
    packed = hasattr(batch, "segment_parent")
    shape = " × ".join(map(str, batch.input_ids.shape))
    more = stats["tokens_padded"] - stats["tokens"]
    padding = f" and {more:,} of padding" if more else ""
    facts = (
        f"{type(batch).__name__} of {batch.family}: {len(batch.sample_ids):,} samples "
        f"in {stats['tokens']:,} rows [{shape}]{padding}, "
        f"{stats['loss_tokens']:,} loss tokens, {len(batch.media):,} media"
    )
    name = f"{type(batch).__name__} of {len(batch.sample_ids):,} samples"
    level = 2 if title else 3  # a notebook has headings of its own
    used = [k for k in range(len(STYLES)) if k == TEXT or (tokens.kind == k).any()]
    forest = [*_forest(batch, tokens), draw.Heading("Samples", level)] if packed else []
    return [
        draw.Heading(title, 1) if title else draw.Heading(name, 3),
        draw.Line(facts),
        *saved_parts(saved, "in this batch", level),
        draw.Heading("Rows" if packed else "Samples", level),
        draw.Key([(STYLES[k], NAMES[k]) for k in used]),
        *forest,
        *_samples(batch, tokens),
        draw.Heading("Figures", level),
        draw.Grid(figures(batch, tokens)),
    ]


def tokens_of(batch: Any) -> Tokens:
    """What each token is, by its id and the loss."""
    ends = np.cumsum([0, *batch.token_counts])
    rows = batch.token_rows.cpu().numpy()
    ids = batch.input_ids.cpu().numpy().reshape(-1)[rows]
    kind = np.zeros(len(rows), np.int8)
    runs = placeholder_runs(ids, batch.family, ends)
    for (start, stop), modality in zip(runs.bounds, runs.modalities, strict=True):
        kind[start:stop] = 1 + MODALITIES.index(modality)
    loss = np.zeros(len(rows), bool)
    loss[np.repeat(ends[:-1], batch.loss_counts) + batch.loss_token_index.cpu().numpy()] = True
    kind[loss & (kind == TEXT)] = LOSS
    before = np.ones(len(rows), bool)
    before[np.unique(rows, return_index=True)[1]] = False
    return Tokens(rows, kind, loss, before, ends)


def saved_by(batch: Any) -> list[Saved]:
    """Rows, media and patches of each sample alone and of the batch."""
    patches = [medium.num_patches for medium in batch.media]
    uses = _uses(batch)
    alone = sum(n * each for n, each in zip(uses, patches, strict=True))
    return [
        ("rows", batch.stats["tokens_unshared"], batch.stats["tokens"]),
        ("media", sum(uses), len(batch.media)),
        ("patches", alone, sum(patches)),
    ]


def figures(batch: Any, tokens: Tokens) -> list[draw.Figure]:
    """Histograms of what samples, media and loss tokens of a batch have."""
    seen = _per_sample((tokens.kind > TEXT) & (tokens.kind < LOSS), tokens)
    out = [
        histogram(batch.token_counts, "tokens of a sample"),
        histogram(batch.loss_counts, "loss tokens of a sample"),
    ]
    if batch.media:
        out += [
            histogram(seen, "placeholders of a sample"),
            histogram([m.num_patches for m in batch.media], "patches of a medium"),
        ]
    kinds = (("reward", batch.rewards), ("cost", batch.costs))
    out += score_histograms((kind, s) for kind, lists in kinds for some in lists for s in some)
    columns = {k: v.detach().float().cpu().numpy() for k, v in batch.loss_columns.items()}
    out += [histogram(values, name) for name, values in columns.items() if values.ndim == 1]
    if {"old_logprobs", "rollout_logprobs"} <= columns.keys():
        ratio = np.exp(columns["old_logprobs"] - columns["rollout_logprobs"])
        out.append(histogram(ratio, "ratio exp(old − rollout)"))
    return out


def _uses(batch: Any) -> list[int]:
    """How many times the samples hold each medium, a shared run once per sample."""
    uses = [0] * len(batch.media)
    if not hasattr(batch, "segment_parent"):
        for medium in batch.media_order:
            uses[medium] += 1
        return uses
    parents = batch.segment_parent.tolist()
    below = [0] * len(parents)  # samples whose tokens run through the segment
    for segment in batch.sample_segment.tolist():
        while segment >= 0:
            below[segment] += 1
            segment = parents[segment]
    offsets = batch.segment_offsets.cpu().numpy()
    for span in batch.modality_spans:
        uses[span.media_index] += below[int(np.searchsorted(offsets, span.start, "right")) - 1]
    return uses


def _forest(batch: Any, tokens: Tokens) -> list[draw.Part]:
    """Segments by rows, and the same as a table."""
    kind, loss = np.zeros(batch.num_tokens, np.int8), np.zeros(batch.num_tokens, bool)
    kind[tokens.rows] = tokens.kind
    kind[tokens.rows[tokens.kind == LOSS]] = LOSS  # also where another sample has them as context
    loss[tokens.rows[tokens.loss]] = True
    offsets, parents = batch.segment_offsets.tolist(), batch.segment_parent.tolist()
    ends: dict[int, list[str]] = {}
    for name, segment in zip(batch.sample_ids, batch.sample_segment.tolist(), strict=True):
        ends.setdefault(segment, []).append(name)
    drawing, left_out = forest_drawing(offsets, parents, ends, kind, loss, STYLES)
    note = "Each box is a segment, as wide as its rows; the boxes below continue it. "
    note += "A box with others below is computed once for all of them."
    rows = [
        (g, f"{offsets[g]:,} to {offsets[g + 1]:,}", "–" if p < 0 else p, ", ".join(ends.get(g, [])))
        for g, p in enumerate(parents[:LISTED])
    ]  # fmt: skip
    lines = [draw.Line(f"{left_out:,} more segments are not drawn.", soft=True)] if left_out else []
    name = f"{len(parents):,} segments"
    name += f", the first {LISTED}" if len(parents) > LISTED else ""
    table = draw.folded_table(
        name, ("segment", "rows", "continues", "samples that end in it"), rows
    )
    return [drawing, draw.Line(note, soft=True), *lines, table]


def _samples(batch: Any, tokens: Tokens) -> list[draw.Part]:
    """A strip of each sample, all to one scale; and their counts as a table."""
    count = len(batch.sample_ids)
    shown = min(count, SAMPLES)
    names = [_short(name) for name in batch.sample_ids[:shown]]
    left = LETTER * max(map(len, names), default=0) + 12
    scale = (draw.WIDE - left) / max([*batch.token_counts, 1])
    shapes: list[draw.Shape] = []
    for b in range(shown):
        y = b * LINE
        shapes.append(draw.Word(0, y + 13, names[b], "mm-soft"))
        where = slice(tokens.ends[b], tokens.ends[b + 1])
        columns = (tokens.kind[where], tokens.loss[where], tokens.before[where])
        for start, stop in pieces(*columns):
            if len(shapes) > draw.MOST:
                break
            k, read, before = (column[start] for column in columns)
            pale = " mm-pale" if before else ""
            about = (
                f"{batch.sample_ids[b]}: {NAMES[k].partition(' (')[0]}, tokens {start} to {stop}"
            )
            about += ", an earlier sample's rows" if before else ""
            x, width = left + start * scale, max((stop - start) * scale, 0.6)
            shapes.append(draw.Box(x, y, width, 16, STYLES[k] + pale, about))
            if read:
                shapes.append(draw.Box(x, y + 17, width, 3, "mm-read"))
    label = f"tokens of the first {shown} samples by what they are"
    note = "All on one scale. " + (
        "Faint: rows of an earlier sample. " if tokens.before.any() else ""
    )
    note += f"The first {shown} of {count:,}." if shown < count else ""
    own = _per_sample(~tokens.before, tokens)
    groups = batch.group_index.tolist()
    rows = [
        (batch.sample_ids[b], groups[b], f"{n:,}", f"{own[b]:,}", f"{batch.loss_counts[b]:,}",
         ", ".join(f"{s.name} {s.value:g}" for s in batch.rewards[b]) or "–")
        for b, n in enumerate(batch.token_counts[:LISTED])
    ]  # fmt: skip
    name = f"{count:,} samples" + (f", the first {LISTED}" if count > LISTED else "")
    head = ("sample", "group", "tokens", "new rows", "loss tokens", "rewards")
    parts = [draw.Drawing(shapes, LINE * shown, label)]
    return [*parts, draw.Line(note.strip(), soft=True), draw.folded_table(name, head, rows)]


def _per_sample(flags: np.ndarray, tokens: Tokens) -> np.ndarray:
    """int64 [B]: how many of bool [sum of L] are set."""
    return np.diff(np.append(0, np.cumsum(flags))[tokens.ends])


def _short(name: str) -> str:
    """With its end, by which samples of a group differ."""
    return name if len(name) <= LONGEST else f"{name[:5]}…{name[6 - LONGEST :]}"
