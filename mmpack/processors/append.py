"""One more turn of a conversation: what the environment said, then what the policy answered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.layout.occurrences import occurring_media
from mmpack.processors.arguments import (
    as_ids,
    as_logprobs,
    check_fields,
    check_lengths,
    template_options,
)
from mmpack.processors.build import COMPUTED, build_sample
from mmpack.processors.conversation import PAST, after_a_turn, source_of
from mmpack.processors.views import pictures
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import REPLAY, Sample
from mmpack.schema.spans import OBSERVATION_SOURCES, LossSpan, ObservationSpan

if TYPE_CHECKING:
    from mmpack.processors.processor import Processor


_DERIVED = COMPUTED | {"attention_mask", "rollout_logprobs", "observation_spans", *REPLAY}


class Observation(NamedTuple):
    """What the environment said: ids, or messages that the chat template writes."""

    ids: Sequence[int] | np.ndarray
    messages: Sequence[dict[str, Any]] | None
    media: Sequence[Any]
    expanded: bool
    source: str | None
    template_kwargs: dict[str, Any] | None


def append_turn(
    processor: Processor,
    sample: Sample,
    observation: Observation,
    response_ids: Sequence[int] | np.ndarray,
    rollout_logprobs: Sequence[float] | np.ndarray | None,
    replay: Replay,
) -> Sample:
    """See `Processor.append`."""
    if not isinstance(sample, Sample):
        raise ArgumentError(
            f"processor.append: the sample is {type(sample).__name__}, expected a Sample. "
            "Fix: pass one that this processor made"
        )
    made_by = sample.processor_fingerprint or processor.fingerprint
    if (sample.family, made_by) != (processor.family.name, processor.fingerprint):
        raise ArgumentError(
            f"processor.append: {sample.sample_id!r:.60} was made by a processor with other settings. "
            "Fix: append with the processor that made it"
        )
    before = occurring_media(sample)
    observed, items, source = _observed(processor, sample, observation, before)
    if source not in OBSERVATION_SOURCES:
        raise ArgumentError(
            f"processor.append: source {source!r} is unknown. Fix: use one of {', '.join(OBSERVATION_SOURCES)}"
        )
    response = as_ids(response_ids, processor.vocab_size, "response_ids")
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
    kept |= joined_replay(sample, replay, len(response), stop)
    ids = np.concatenate([sample.input_ids, observed, response])
    return build_sample(processor.parts, ids, before + items, spans, **kept)


def _observed(
    processor: Processor, sample: Sample, given: Observation, before: list[Medium]
) -> tuple[np.ndarray, list[Medium], str]:
    """Expanded ids of the observation, its media, and its source. `before`: the media in `sample`, in order."""
    ids = as_ids(given.ids, processor.vocab_size, "observation_ids")
    if given.messages is None:
        items = processor.media_from(given.media)
        if not given.expanded:
            ids, _ = processor.prompts.expanded(ids, items, before)
        return ids, items, given.source or "tool"
    if len(ids):
        raise ArgumentError(
            "processor.append: observation_ids and messages say the same thing. Fix: pass one of them"
        )
    items = processor.media_of(given.messages, given.media)
    options = template_options(given.template_kwargs, prompt=True)

    def render(messages: Sequence[dict[str, Any]], **more: Any) -> str:
        return processor.prompts.rendered(messages, {**options, **more}, PAST, PAST)

    shown = [views[0].modality for views in pictures(before)]
    ending, text = after_a_turn(render, given.messages, shown)
    encoded = processor.prompts.encoded
    ids, end = encoded(text, items, before), encoded(ending, (), before)
    had = _overlap(sample.input_ids, end)
    if not had and not (sample.loss_spans and sample.loss_spans[-1].stop == len(sample)):
        raise ArgumentError(
            f"processor.append: {sample.sample_id!r:.60} ends in a prompt that has no response yet. "
            "Fix: append the response first"
        )
    source = source_of([message["role"] for message in given.messages])
    return ids[had:], items, given.source or source


def _overlap(ids: np.ndarray, end: np.ndarray) -> int:
    """How many ids of a turn's end the sample has: engines return the end of turn, and no line break behind it."""
    return next((n for n in range(len(end), 0, -1) if np.array_equal(ids[-n:], end[:n])), 0)


def _joined_logprobs(sample: Sample, more: Any, count: int) -> np.ndarray | None:
    """The logprobs of all turns, or None if a turn has none."""
    new, old = as_logprobs(more, count), sample.rollout_logprobs
    if new is None and not count:
        return old
    if old is None and not sample.num_loss_tokens:
        return new
    return None if new is None or old is None else np.concatenate([old, new])


class Replay(NamedTuple):
    """What a response brings: n lists; n lists per teacher; routes of all tokens, its context's too [L, layers, k]."""

    kept_ids: Ragged | None
    teachers: dict[str, Ragged] | None
    routed_experts: np.ndarray | None


def joined_replay(sample: Sample, new: Replay, count: int, length: int) -> dict[str, Any]:
    """The fields of `sample` with a response of `count` ids behind it, `length` tokens in all. Raises ArgumentError."""
    check_fields(new._asdict())
    check_lengths(new._asdict(), count, length)
    return {
        "kept_ids": _kept(sample, new.kept_ids, count),
        "teachers": _teachers(sample, new.teachers or {}, count),
        "routed_experts": _routes(sample, new.routed_experts, count, length),
    }


def _kept(sample: Sample, new: Ragged | None, count: int) -> Ragged | None:
    old = sample.kept_ids
    if not count:
        return old
    if not sample.num_loss_tokens:
        return new
    if (old is None) != (new is None):
        who = "the response" if new is None else "the sample"
        raise ArgumentError(
            f"processor.append: {who} has no kept_ids, but the other has. Fix: pass them for every turn, or for none"
        )
    return None if old is None or new is None else Ragged.cat([old, new])


def _teachers(sample: Sample, new: dict[str, Ragged], count: int) -> dict[str, Ragged] | None:
    """A teacher that says nothing of a turn has empty lists there."""
    old = sample.teachers or {}
    sides = (old, sample.num_loss_tokens), (new, count)
    return {
        name: Ragged.cat([x.get(name, Ragged.empty(n, scored=True)) for x, n in sides])
        for name in dict.fromkeys([*old, *new])
    } or None


def _routes(sample: Sample, new: np.ndarray | None, count: int, length: int) -> np.ndarray | None:
    old = sample.routed_experts
    if new is None and count and old is not None:
        raise ArgumentError(
            "processor.append: the sample has routed_experts, but the response has none. "
            "Fix: pass the engine's routes of all tokens, or set the sample's to None"
        )
    if new is None:  # what came back is not run yet: no logprob reads it
        tail = None if old is None else np.zeros((length - len(old), *old.shape[1:]), old.dtype)
        return None if old is None or tail is None else np.concatenate([old, tail])
    ran = int(sample.loss_indices.max()) if sample.num_loss_tokens else 0
    if ran and (old is None or not np.array_equal(old[:ran], new[:ran])):
        raise ArgumentError(
            "processor.append: routed_experts of the earlier tokens differ from the sample's. "
            "Fix: make a separate sample of this turn (mmpack.trajectory)"
        )
    return new
