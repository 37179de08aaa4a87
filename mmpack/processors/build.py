"""Expanded ids [L] and their media to a Sample: runs checked against grids, positions and spans derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family
from mmpack.layout.fingerprint import fingerprint, response_hash
from mmpack.layout.mrope import grids_of_media, mrope_positions
from mmpack.layout.occurrences import context_ids, spans_from_runs
from mmpack.layout.runs import Runs, placeholder_runs
from mmpack.processors.arguments import as_logprobs, check_fields, check_lengths, check_names
from mmpack.processors.settings import Parts
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, covered

COMPUTED = {
    *("schema_version", "family", "input_ids", "media", "modality_spans", "loss_spans"),
    *("position_ids", "processor", "processor_fingerprint"),
}
SETTABLE = [name for name in Sample.columns() if name not in COMPUTED]


def build_sample(
    parts: Parts,
    ids: np.ndarray,
    media: Sequence[Medium],
    loss_spans: list[LossSpan],
    *,
    sample_id: str,
    group_id: str | None,
    **fields: Any,
) -> Sample:
    """Check placeholders against `media` (one per occurrence, outside of the loss), and derive all the rest."""
    check_names(fields, SETTABLE, "processor", "Sample")
    check_fields({"sample_id": sample_id, "group_id": group_id} | fields)
    family = parts.family
    policy = covered(loss_spans, len(ids))
    context = context_ids(ids, policy, family)
    _refuse_unread(context, family)
    runs = placeholder_runs(context, family)
    _refuse_lone(runs, media, family)
    positions, _ = mrope_positions(
        context,
        family,
        **grids_of_media(media),
        rule=parts.position_rule,
        tokens_per_second=parts.tokens_per_second,
    )
    distinct, spans = spans_from_runs(runs, media, family, "processor")
    logprobs = fields.pop("rollout_logprobs", None)
    check_lengths(fields, int(policy.sum()), len(ids))
    metadata = dict(fields.pop("metadata", None) or {})
    if policy.any():
        written = ids[policy].tolist()
        metadata[RESPONSE_TEXT_KEY] = response_hash(parts.tokenizer.decode(written), written)
    settings = parts.settings
    return Sample(
        sample_id=sample_id,
        group_id=sample_id if group_id is None else group_id,
        family=family.name,
        input_ids=ids,
        media=distinct,
        modality_spans=spans,
        loss_spans=loss_spans,
        position_ids=positions,
        attention_mask=np.ones(len(ids), dtype=np.int8),
        processor=settings,
        processor_fingerprint=fingerprint(settings),
        rollout_logprobs=as_logprobs(logprobs, int(policy.sum())),
        metadata=metadata,
        **fields,
    )


def _refuse_unread(ids: np.ndarray, family: Family) -> None:
    """Raise ArgumentError for placeholders of media that samples of the family can't hold."""
    for what, placeholder in family.unread:
        at = np.flatnonzero(ids == placeholder)
        if len(at):
            raise ArgumentError(
                f"processor: token {at[0]} stands for {what}, which mmpack does not read for {family.name}. "
                "Fix: leave it out"
            )


def _refuse_lone(found: Runs, media: Sequence[Medium], family: Family) -> None:
    """Raise LayoutError for one placeholder where a medium has several: ids that were not expanded."""
    lengths = [sum(b - a for a, b in runs) for _, runs in found.media()]
    starts = [runs[0][0] for _, runs in found.media()]
    i = 0
    for m in media:
        if family.tokens_by_size is not None and lengths[i : i + 1] not in ([], [m.num_tokens]):
            raise LayoutError(
                f"processor: the run of token {starts[i]} has {lengths[i]} tokens, its {m.modality} has "
                f"{m.num_tokens}. Fix: expand each placeholder to the tokens of its medium",
                "MM101",
            )
        runs = family.spans_of(m.modality, m.grid_thw)
        if lengths[i : i + 1] == [1] and m.num_tokens > runs:
            what = "audio" if m.modality == "audio" else "vision"
            raise LayoutError(
                f"processor: token {starts[i]} is one {m.modality} placeholder, the {m.modality} has "
                f"{m.num_tokens} {what} tokens. Fix: pass expanded=False if the ids hold one placeholder per medium",
                "MM101",
            )
        i += runs
