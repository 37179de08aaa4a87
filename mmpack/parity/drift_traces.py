"""Drift of two traces, sample by sample: those whose logprobs are of the same tokens and mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.parity.drift import LogprobDrift, logprob_column, logprob_drift
from mmpack.parity.drift_replay import ComparedKept, ComparedRoutes
from mmpack.parity.join import Matched, Source, paired
from mmpack.parity.sampling import cuts_ids, unlike_sampling
from mmpack.schema.sample import Sample

NOT_GIVEN = "train_logprobs has none"
CARRIED = "both traces carry the rollout's own logprobs"


def trace_drift(
    rollout: Source,
    train: Source,
    train_logprobs: Mapping[str, np.ndarray] | None = None,
    *,
    version: str | None = None,
    near: int = 64,
) -> tuple[LogprobDrift | None, dict[str, int]]:
    """The drift of all samples that two traces share, and why others were left out: reason -> samples.

    None where no logprobs can be compared: none recorded, of other ids or kinds, or, in every sample, the very numbers
    of the rollout, which the trainer's trace carries along.

    Args:
        rollout, train: samples, or the path of a trace, paired by sample_id.
        train_logprobs: sample_id -> the trainer's logprobs [n] (natural log), one per loss token, in place of
            its trace's; a sample without any is left out.
        version, near: as `logprob_drift` takes them.

    Memory: some 200 bytes per loss token. Raises: TraceError; ArgumentError.

    Example:
        >>> import mmpack as mp, numpy as np
        >>> from mmpack.parity.drift_traces import trace_drift
        >>> def sample(logprobs):
        ...     loss, ids = [mp.LossSpan(2, 4)], np.arange(4)
        ...     return mp.Sample("s", "g", "qwen2_vl", ids, [], [], loss, rollout_logprobs=np.float32(logprobs))
        >>> drift, left_out = trace_drift([sample([-1, -2])], [sample([-1, -2.5])])
        >>> drift.max_abs, left_out
        (0.5, {})
    """
    if train_logprobs is not None and not isinstance(train_logprobs, Mapping):
        raise ArgumentError(
            f"trace_drift: train_logprobs is {kind_of(train_logprobs)}, expected a mapping. "
            "Fix: pass {sample_id: logprobs [n]}"
        )
    samples: list[Sample] = []
    theirs: list[np.ndarray] = []
    left_out: Counter[str] = Counter()
    routes, kept = ComparedRoutes(), ComparedKept()
    for item in paired(rollout, train):
        if not isinstance(item, Matched):
            continue
        given = (train_logprobs or {}).get(item.left.sample_id)
        if given is not None:
            given = logprob_column(given, item.left.sample_id)
        other = item.right.rollout_logprobs if train_logprobs is None else given
        if other is None and train_logprobs is not None:  # never the rollout's own in their place
            left_out[NOT_GIVEN] += 1
            continue
        if item.left.rollout_logprobs is None or other is None:
            continue
        if why := unlike_logprobs(item.left, item.right, given):
            left_out[why] += 1
            continue
        routes.add(item.left, item.right.routed_experts)
        own = item.right.sampling if given is None else None  # of the trace's own logprobs
        over_all = (own or {}).get("logprobs") == "raw"  # whatever was kept
        theirs_kept = None if over_all else item.right.kept_ids
        kept.add(item.left, theirs_kept, filtered=cuts_ids(own))
        samples.append(_needed(item.left))
        theirs.append(np.asarray(other, np.float64))
    carried = train_logprobs is None and all(
        np.array_equal(s.rollout_logprobs, other, equal_nan=True)  # type: ignore[arg-type]
        for s, other in zip(samples, theirs, strict=True)
    )
    if samples and carried:
        left_out[CARRIED] += len(samples)
    elif sum(map(len, theirs)):
        replayed: dict[str, Any] = {"routed_experts": routes, "kept_ids": kept}
        drift = logprob_drift(samples, theirs, version=version, near=near, **replayed)
        return drift, dict(left_out)
    return None, dict(left_out)


def unlike_logprobs(left: Sample, right: Sample, train_logprobs: np.ndarray | None) -> str | None:
    """Why the logprobs of a pair can't be compared; None if they can. Both sides have them.

    `train_logprobs` [n]: the trainer's, where its trace doesn't hold them.
    """
    other = right.rollout_logprobs if train_logprobs is None else train_logprobs
    assert left.rollout_logprobs is not None and other is not None
    rows = left.loss_indices, right.loss_indices
    if [len(r) for r in rows] != [len(left.rollout_logprobs), len(other)] or len(rows[0]) != len(
        rows[1]
    ):
        return "logprobs of other tokens"
    if len(rows[0]) != left.num_loss_tokens:  # spans beyond the ids
        return "logprobs of other tokens"
    if not np.array_equal(left.input_ids[rows[0]], right.input_ids[rows[1]]):
        return "logprobs of other ids"
    if train_logprobs is None and unlike_sampling(left.sampling, right.sampling, drift=True):
        return "logprobs of unlike kinds"
    return None


def _needed(sample: Sample) -> Sample:
    """Drop all that `logprob_drift` doesn't read of a sample whose logprobs' kind was checked."""
    engine = {k: v for k, v in sample.metadata.items() if k == "engine"}
    return replace(
        sample,
        input_ids=np.broadcast_to(np.int64(0), len(sample)),
        position_ids=None,
        attention_mask=None,
        media=[],
        processor=None,
        sampling=None,
        kept_ids=None,
        teachers=None,
        routed_experts=None,
        metadata=engine,
    )
