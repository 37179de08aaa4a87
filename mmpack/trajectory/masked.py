"""`from_masked`: one flat row of ids with a mask of what the policy sampled, as agent loops record it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_flag, kind_of
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs, true_runs
from mmpack.processors.arguments import as_ids
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan
from mmpack.trajectory.record_columns import lists_of
from mmpack.trajectory.sample_turns import from_samples
from mmpack.trajectory.trajectory import SCORES, Trajectory


def from_masked(
    prompt_ids: Any,
    response_ids: Any,
    mask: Any,
    processor: Processor,
    *,
    trajectory_id: str,
    group_id: str,
    media: Sequence[Any] = (),
    logprobs: Any = None,
    kept_ids: Any = None,
    expanded: bool = True,
    keep_last_observation: bool = False,
    **fields: Any,
) -> Trajectory:
    """A growing conversation: each run of 1 in `mask` is a turn, each run of 0 what came back.

    Args:
        prompt_ids: int [P].
        response_ids: int [R], sampled and observed ids, as the engine had them; never encoded again.
        mask: 0/1 [R], 1 where the policy sampled.
        processor: `mp.wrap_processor` of the model's processor.
        media: as `processor.from_ids` takes them, one per picture, in order.
        logprobs: float [R], what the engine gave; read where `mask` is 1.
        kept_ids: R lists of ids, or their Ragged; read where `mask` is 1, and none is empty there.
        expanded: whether a picture has one id per vision token, or one in all.
        keep_last_observation: keep what came after the last sampled id. Without, it is cut, and its media are left
            out: no loss token reads it, and loops that cut rows at a length leave half pictures there.
        fields: rewards, costs, verifiers, sampling and metadata of Trajectory.

    Raises: ArgumentError; LayoutError where placeholders and media contradict each other.
    """
    check_flag("from_masked", "expanded", expanded)
    check_flag("from_masked", "keep_last_observation", keep_last_observation)
    check_processor("from_masked", processor)
    prompt = as_ids(prompt_ids, processor.vocab_size, "prompt_ids")
    response = as_ids(response_ids, processor.vocab_size, "response_ids")
    sampled = mask_of("from_masked", mask, len(response))
    values = values_of("from_masked", logprobs, len(response))
    values = None if values is None else values[sampled]
    if not sampled.any():
        raise ArgumentError(
            f"from_masked: {trajectory_id!r:.60} has no sampled id. Fix: leave out episodes without an answer"
        )
    if (lists := lists_of(kept_ids, len(response), "kept_ids", "from_masked")) is not None:
        fields["kept_ids"] = _of_sampled(lists, sampled)
    items = processor.media_from(media)
    stop = int(np.flatnonzero(sampled)[-1]) + 1
    if not keep_last_observation and stop < len(response):
        if len(placeholder_runs(response[stop:], processor.family)):
            before = np.concatenate([prompt, np.where(sampled, 0, response)[:stop]])
            items = media_in(before, items, processor.family, expanded)
        response, sampled = response[:stop], sampled[:stop]
    spans = [
        LossSpan(len(prompt) + a, len(prompt) + b, turn=k)
        for k, (a, b) in enumerate(true_runs(sampled))
    ]
    scores = {name: fields.pop(name, None) for name in SCORES}
    sample: Sample = processor.from_ids(
        np.concatenate([prompt, response]),
        items,
        bool(expanded),
        spans,
        sample_id=trajectory_id,
        group_id=group_id,
        rollout_logprobs=values,
        **fields,
    )
    sample.trajectory_id = trajectory_id
    (trajectory,) = from_samples([sample])
    return dataclasses.replace(trajectory, **scores)


def check_processor(what: str, processor: Any) -> None:
    """Raise ArgumentError for what `mp.wrap_processor` did not make, as a framework's own processor."""
    if not hasattr(processor, "family"):
        raise ArgumentError(
            f"{what}: processor is {kind_of(processor)}. Fix: pass mp.wrap_processor of the model's processor"
        )


def _of_sampled(lists: Ragged, sampled: np.ndarray) -> Ragged:
    if len(empty := np.flatnonzero((lists.lengths == 0) & sampled)):
        raise ArgumentError(
            f"from_masked: kept_ids is empty at response id {empty[0]}, which was sampled. "
            "Fix: pass the ids that the sampler left there"
        )
    return lists[sampled]


def media_in(
    ids: np.ndarray, media: Sequence[Medium], family: Family, expanded: bool
) -> list[Medium]:
    """The first of `media`, as many as `ids` have placeholders for."""
    if not expanded:
        return list(media[: int(np.isin(ids, list(family.prompt_ids.values())).sum())])
    runs = len(placeholder_runs(ids, family))
    counts = [family.spans_of(m.modality, m.grid_thw) for m in media]
    return [m for m, end in zip(media, np.cumsum(counts), strict=True) if end <= runs]


def mask_of(where: str, given: Any, count: int) -> np.ndarray:
    """bool [count]. Raises: ArgumentError."""
    try:
        mask = np.asarray(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        mask = np.zeros((0, 0), dtype=object)
    known = mask.shape == (count,) and (not count or mask.dtype.kind in "biu")
    if not known or not np.isin(mask, (0, 1)).all():
        raise ArgumentError(
            f"{where}: mask has shape {list(mask.shape)} and dtype {mask.dtype}, expected 0 or 1 [{count}]. "
            "Fix: pass one value per response id, 1 where the policy sampled"
        )
    return mask.astype(bool)


def values_of(where: str, given: Any, count: int) -> np.ndarray | None:
    """float32 [count]; those of ids that were not sampled may be anything. Raises: ArgumentError."""
    if given is None:
        return None
    try:
        values = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        values = np.zeros((0, 0), np.float32)
    if values.shape != (count,) or isinstance(given, str):
        raise ArgumentError(
            f"{where}: logprobs has shape {list(values.shape)}, expected [{count}]. "
            "Fix: pass one value per response id, anything where the mask is 0"
        )
    return values
