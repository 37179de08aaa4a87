"""Expanded ids [L] and their media to a Sample: runs checked against grids, positions and spans derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family
from mmpack.layout.fingerprint import fingerprint
from mmpack.layout.mrope import mrope_positions
from mmpack.layout.runs import placeholder_runs
from mmpack.processors.arguments import as_logprobs, check_fields
from mmpack.processors.settings import text_hash
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

if TYPE_CHECKING:
    from mmpack.processors.wrap import Processor

COMPUTED = {
    "schema_version",
    "family",
    "input_ids",
    "media",
    "modality_spans",
    "loss_spans",
    "position_ids",
    "processor",
    "processor_fingerprint",
}


def build_sample(
    processor: Processor,
    ids: np.ndarray,
    media: Sequence[Medium],
    loss_spans: list[LossSpan],
    *,
    sample_id: str,
    group_id: str | None,
    **fields: Any,
) -> Sample:
    """Check placeholders against `media` (one an occurrence, outside of the loss), and derive all the rest."""
    unknown = [name for name in fields if name not in Sample.columns() or name in COMPUTED]
    if unknown:
        raise ArgumentError(
            f"processor: {unknown[0]!r} is no field of Sample, or one that follows from the ids. Fix: drop it"
        )
    check_fields({"sample_id": sample_id, "group_id": group_id} | fields)
    family = processor.family
    policy = loss_mask(loss_spans, len(ids))
    # a placeholder that the policy sampled stands for nothing: to the engine it was a word
    context = np.where(policy, family.pad_token_id, ids)
    _refuse_lone(context, media, family)
    videos = [m for m in media if m.modality == "video"]
    positions, _ = mrope_positions(
        context,
        family,
        image_grid_thw=[m.grid_thw for m in media if m.modality == "image"],
        video_grid_thw=[m.grid_thw for m in videos],
        second_per_grid_ts=[
            1.0 if m.second_per_grid_ts is None else m.second_per_grid_ts for m in videos
        ],
        rule=processor.position_rule,
        tokens_per_second=processor.tokens_per_second,
    )
    distinct, spans = _modality_spans(context, media, processor)
    logprobs = fields.pop("rollout_logprobs", None)
    metadata = dict(fields.pop("metadata", None) or {})
    if policy.any():
        metadata[RESPONSE_TEXT_KEY] = text_hash(processor.tokenizer.decode(ids[policy].tolist()))
    settings = processor.settings
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


def loss_mask(spans: Sequence[LossSpan], length: int) -> np.ndarray:
    """bool [L]: is the token in a loss span?"""
    inside = np.zeros(length, dtype=bool)
    for s in spans:
        inside[s.start : s.stop] = True
    return inside


def _refuse_lone(context: np.ndarray, media: Sequence[Medium], family: Family) -> None:
    """Raise LayoutError for one placeholder where a medium has several: ids that were not expanded."""
    found = placeholder_runs(context, family)
    lengths = (found.stops - found.starts).tolist()
    i = 0
    for m in media:
        runs = family.spans_of(m.modality, m.grid_thw)
        if lengths[i : i + 1] == [1] and m.num_tokens > runs:
            raise LayoutError(
                f"processor: token {found.starts[i]} is one {m.modality} placeholder, the {m.modality} has "
                f"{m.num_tokens} vision tokens. Fix: expanded=False, for ids with one placeholder a medium",
                "MM101",
            )
        i += runs


def _modality_spans(
    context: np.ndarray, media: Sequence[Medium], processor: Processor
) -> tuple[list[Medium], list[ModalitySpan]]:
    """Distinct media in order of first use, and a span for each run of placeholders."""
    family = processor.family
    frames = [
        (m, k if family.video_layout == "frames" and m.modality == "video" else None)
        for m in media
        for k in range(family.spans_of(m.modality, m.grid_thw))
    ]
    found = placeholder_runs(context, family)
    kinds = ["video" if video else "image" for video in found.is_video]
    if kinds != [m.modality for m, _ in frames]:
        raise LayoutError(
            f"processor: the ids have runs of {kinds}, the media are {[m.modality for m in media]}. "
            "Fix: media in the order of their placeholders",
            "MM106",
        )
    place: dict[tuple[str, float | None], int] = {}
    distinct: list[Medium] = []
    spans = []
    for start, stop, (m, frame) in zip(found.starts, found.stops, frames, strict=True):
        key = m.cache_key, m.second_per_grid_ts  # which moves positions, not embeddings
        at = place.setdefault(key, len(distinct))
        if at == len(distinct):
            distinct.append(m)
        spans.append(ModalitySpan(int(start), int(stop), m.modality, at, frame))
    return distinct, spans
