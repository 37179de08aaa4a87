"""MM201 to MM204: loss spans, which cover neither placeholders nor observations."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.rules.placeholders import PLACEHOLDERS
from mmpack.schema.rules.topic import Found, Topic, before, overlaps
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered, is_placeholder


def problems(sample: Sample, family: Family) -> Found:
    end = 0
    observations = sample.observation_spans
    observed = covered(observations, len(sample)) if observations else np.zeros(0, bool)
    for i, s in enumerate(sample.loss_spans):
        field, at = f"loss_spans[{i}]", (s.start, s.stop)
        if not end <= s.start <= s.stop <= len(sample):
            yield "MM201", field, f"[{s.start}, {s.stop}) after {end}, of {len(sample)} tokens", at
            continue
        end = s.stop
        if s.start == 0:
            yield "MM202", field, "starts at token 0", at
        hit = is_placeholder(sample.input_ids[s.start : s.stop], family)
        if hit.any():
            token = s.start + int(hit.argmax())
            message = f"covers placeholder {sample.input_ids[token]} at token {token}"
            yield "MM203", field, message, at
        if observed[s.start : s.stop].any():
            token = s.start + int(np.argmax(observed[s.start : s.stop]))
            yield "MM204", field, f"covers token {token} of an observation", at


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """Placeholders are those that modality spans cover: true of rows that PLACEHOLDERS finds valid."""
    ids, loss = table.ids, table.items("loss_spans")
    ok = loss.good & PLACEHOLDERS.valid_rows(table)
    first = ids.bounds[:-1].astype(np.int64)
    row, start, stop = loss.row, loss.numbers("start"), loss.numbers("stop")
    wrong = (start < before(row, stop)) | (start > stop) | (stop > ids.lengths[row])
    ok[row[wrong | (start == 0)]] = False
    for name in ("modality_spans", "observation_spans"):
        spans = table.items(name)
        begin, end = spans.numbers("start"), spans.numbers("stop")
        unsorted = (begin < before(spans.row, end)) | (end > ids.lengths[spans.row])
        ok[spans.row[unsorted]] = False
        kept = ok[spans.row] & (begin < end)
        shift = first[spans.row[kept]]
        hit = overlaps(
            first[row] + start, first[row] + stop, shift + begin[kept], shift + end[kept]
        )
        ok[row[hit]] = False
    return ok


LOSS = Topic(
    codes=("MM201", "MM202", "MM203", "MM204"),
    fields=("input_ids", "media", "modality_spans", "loss_spans", "observation_spans"),
    problems=problems,
    valid=valid,
)
