"""What a notebook shows of a sample, a plan, a batch or a loss; the page of a batch: its forest, what sharing saves."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.planning.planned import Plan
from mmpack.schema.sample import Sample
from mmpack.view.bars import WIDTH, drawing, histogram
from mmpack.view.document import document
from mmpack.view.parity.style import STYLE
from mmpack.view.plan import OWN, drawn
from mmpack.view.tags import Markup, joined, table, tag
from mmpack.view.trace.roles import ROLES, roles_of, rows_of

LEVEL = 18.0  # height of a box
PIECES = 2000  # boxes of one drawing
COLOURS = ("text", "image", "video", "observation", "loss", "loss", "loss", "audio")  # of ROLES
CARD = """
.mmpack .mm-forest{width:100%;min-width:420px;display:block;font:11px system-ui,sans-serif}
.mmpack .mm-forest rect{stroke:var(--bg);stroke-width:1}.mmpack .mm-forest text{fill:var(--fg)}
.mmpack rect.mm-read{fill:var(--fg)}
"""


def card(what: Any) -> Markup:
    """A fragment for a notebook.

    Raises: MissingExtraError without MarkupSafe.
    """
    body = _body(what)
    return tag("div", Markup(f"<style>{STYLE}{OWN}{CARD}</style>"), body, class_="mmpack")


def batch_page(batch: Any, title: str = "pack") -> str:
    """A packed or padded batch as one self-contained page that runs no script and loads nothing."""
    return document(title, STYLE + CARD, joined([tag("h1", title), _batch(batch)]))


def _body(what: Any) -> Markup:
    if isinstance(what, Sample):
        return _sample(what)
    if isinstance(what, Plan):
        return drawn(what)
    return _loss(what) if hasattr(what, "metrics") else _batch(what)


def _sample(sample: Sample) -> Markup:
    facts = [
        ("family", sample.family),
        ("group", sample.group_id),
        ("tokens", f"{len(sample):,}"),
        ("in the loss", f"{sample.num_loss_tokens:,}"),
        ("media", f"{len(sample.media):,} ({sample.num_patches:,} patches)"),
        *((f"reward {s.name}", f"{s.value:g}") for s in sample.rewards or ()),
    ]
    rows = rows_of(roles_of(sample), 0, ())
    scale = WIDTH / max(len(sample), 1)
    boxes = []
    for row in rows[:PIECES]:
        about = f"{ROLES[row.role]}{', loss' if row.loss else ''}: tokens {row.start} to {row.stop}"
        box = {
            "x": f"{row.start * scale:.2f}",
            "width": f"{max((row.stop - row.start) * scale, 0.6):.2f}",
        }
        colour = f"mm-{COLOURS[row.role]}"
        boxes.append(tag("rect", tag("title", about), class_=colour, y=0, height=LEVEL, **box))
        if row.loss:
            boxes.append(tag("rect", class_="mm-read", y=LEVEL + 2, height=4, **box))
    strip = drawing(boxes, LEVEL + 8, f"tokens of {sample.sample_id} by what they are")
    more = len(rows) - PIECES
    used = dict.fromkeys((COLOURS[row.role], ROLES[row.role]) for row in rows)
    notes = [f"and {more} stretches more"] if more > 0 else []
    note = "A line below marks tokens that the loss reads."
    return joined(
        [
            tag("h3", f"sample {sample.sample_id}"),
            table(("what", "value"), facts),
            _key([*used]),
            tag("div", strip, class_="wide"),
            tag("p", " ".join([note, *notes]), class_="mm-note"),
        ]
    )


def _batch(batch: Any) -> Markup:
    stats = batch.stats
    rows, alone = stats["tokens"], stats["tokens_unshared"]
    patches = [medium.num_patches for medium in batch.media]
    uses = _uses(batch)
    kept = [
        ("rows", alone, rows),
        ("media", sum(uses), len(batch.media)),
        ("patches", sum(n * each for n, each in zip(uses, patches, strict=True)), sum(patches)),
    ]
    saved = [
        (name, f"{before:,}", f"{after:,}", f"{1 - after / before:.1%}" if before else "–")
        for name, before, after in kept
    ]
    shape = " × ".join(map(str, batch.input_ids.shape))
    facts = [
        ("family", batch.family),
        ("samples", f"{len(batch.sample_ids):,}"),
        ("input_ids", f"[{shape}]"),
        ("rows with padding", f"{stats['tokens_padded']:,}"),
        ("in the loss", f"{stats['loss_tokens']:,}"),
    ]
    parts = [
        tag("h3", f"{type(batch).__name__} of {len(batch.sample_ids)} samples"),
        table(("what", "value"), facts),
        tag("h3", "What is repeated, and what sharing saves"),
        table(("what", "each sample alone", "in this batch", "saved"), saved),
    ]
    if hasattr(batch, "segment_parent"):
        parts += [tag("h3", "Forest"), tag("div", _forest(batch), class_="wide"), _forest_note()]
    parts += [tag("h3", "Lengths"), histogram(batch.token_counts, "tokens of a sample")]
    parts += [histogram(batch.loss_counts, "loss tokens of a sample")]
    return joined(parts)


def _uses(batch: Any) -> list[int]:
    """Of each medium: how many times the samples hold it, a shared run once per sample."""
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


def _forest_note() -> Markup:
    said = (
        "A box is a segment, as wide as its rows; a box below another goes on from it. "
        "The top one is computed once for all below it."
    )
    return tag("p", said, class_="mm-note")


def _forest(batch: Any) -> Markup:
    """Segments by rows from left to right, and by depth from top to bottom."""
    offsets, parents = batch.segment_offsets.tolist(), batch.segment_parent.tolist()
    owners: dict[int, list[str]] = {}
    for name, segment in zip(batch.sample_ids, batch.sample_segment.tolist(), strict=True):
        owners.setdefault(segment, []).append(name)
    level: list[int] = []
    for parent in parents:
        level.append(0 if parent < 0 else level[parent] + 1)
    scale = WIDTH / max(offsets[-1], 1)
    boxes = []
    for g, depth in enumerate(level[:PIECES]):
        width, x = (offsets[g + 1] - offsets[g]) * scale, offsets[g] * scale
        ends = owners.get(g, [])
        whose = f", ends {', '.join(ends[:3])}{' …' if len(ends) > 3 else ''}" if ends else ""
        about = f"segment {g}: rows {offsets[g]} to {offsets[g + 1]}{whose}"
        boxes.append(
            tag(
                "rect",
                tag("title", about),
                class_="mm-loss" if g in owners else "mm-text",
                x=f"{x:.2f}",
                y=f"{depth * (LEVEL + 2):.0f}",
                width=f"{max(width, 0.6):.2f}",
                height=LEVEL,
            )
        )
    height = (max(level, default=0) + 1) * (LEVEL + 2)
    return drawing(boxes, height, f"{len(parents)} segments of {len(batch.sample_ids)} samples")


def _key(used: list[tuple[str, str]]) -> Markup:
    entries = []
    for colour, name in used:
        box = tag("rect", width=10, height=10, class_=f"mm-{colour}")
        entries.append(tag("span", tag("svg", box, view_box="0 0 10 10"), name))
    return tag("div", *entries, class_="mm-key")


def _loss(out: Any) -> Markup:
    rows = [(name, f"{float(value):.6g}") for name, value in out.metrics.items()]
    loss = f"{float(out.loss.detach()):.6g}"
    return joined([tag("h3", f"{type(out).__name__}: {loss}"), table(("metric", "value"), rows)])
