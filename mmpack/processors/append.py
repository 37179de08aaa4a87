"""One more turn of a conversation: what the environment said, then what the policy answered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.processors.build import COMPUTED, as_ids, as_logprobs, build_sample
from mmpack.processors.expand import expanded_ids
from mmpack.schema.sample import Sample
from mmpack.schema.spans import OBSERVATION_SOURCES, LossSpan, ObservationSpan

if TYPE_CHECKING:
    from mmpack.processors.wrap import Processor

_DERIVED = COMPUTED | {"attention_mask", "rollout_logprobs", "observation_spans"}


def append_turn(
    processor: Processor,
    sample: Sample,
    observation_ids: Sequence[int] | np.ndarray,
    media: Sequence[Any],
    expanded: bool,
    source: str,
    response_ids: Sequence[int] | np.ndarray,
    rollout_logprobs: Sequence[float] | np.ndarray | None,
) -> Sample:
    """See `Processor.append`."""
    if source not in OBSERVATION_SOURCES:
        raise ArgumentError(
            f"processor.append: source {source!r} is unknown. Fix: use one of {', '.join(OBSERVATION_SOURCES)}"
        )
    made_by = sample.processor_fingerprint or processor.fingerprint
    if (sample.family, made_by) != (processor.family.name, processor.fingerprint):
        raise ArgumentError(
            f"processor.append: {sample.sample_id!r:.60} was made by a processor of other settings. "
            "Fix: append with the one that made it"
        )
    items = processor.media_from(media)
    observed = as_ids(observation_ids)
    if not expanded:
        observed, _ = expanded_ids(
            observed, items, processor.family, processor.tokenizer, processor.video_markers
        )
    response = as_ids(response_ids)
    start = len(sample)
    middle, stop = start + len(observed), start + len(observed) + len(response)
    turn = 1 + max((s.turn or 0 for s in sample.loss_spans), default=-1)
    spans = list(sample.loss_spans)
    observations = list(sample.observation_spans or ())
    if len(observed):
        observations.append(ObservationSpan(start, middle, source, turn))
    if len(response):
        spans.append(LossSpan(middle, stop, turn=turn))
    kept = {
        name: copy.copy(getattr(sample, name)) for name in Sample.columns() if name not in _DERIVED
    }
    kept["observation_spans"] = observations or None
    if len(response):
        kept["finish_reason"] = None
    kept["rollout_logprobs"] = _joined_logprobs(sample, rollout_logprobs, len(response))
    runs = [sample.media[s.media_index] for s in sample.modality_spans if not s.frame]
    ids = np.concatenate([sample.input_ids, observed, response])
    return build_sample(processor, ids, runs + items, spans, **kept)


def _joined_logprobs(sample: Sample, more: Any, count: int) -> np.ndarray | None:
    """The logprobs of all turns, or None if a turn has none."""
    new, old = as_logprobs(more, count), sample.rollout_logprobs
    if new is None and not count:
        return old
    if old is None and not sample.num_loss_tokens:
        return new
    return None if new is None or old is None else np.concatenate([old, new])
