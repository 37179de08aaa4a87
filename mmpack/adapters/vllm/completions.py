"""One completion of a RequestOutput as a sample: ids, logprobs, kept ids, routes and versions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.adapters.engine_routes import routes_of_rows
from mmpack.adapters.row_sample import continued_positions
from mmpack.adapters.vllm.kept import Step, kept_ids
from mmpack.layout.fingerprint import fingerprint, response_hash
from mmpack.layout.names import SAMPLING_NAMES
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, PolicyVersion

LOGPROB_KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


_FINISHED = {"stop": "stop", "length": "length", "abort": "abort"}


def sample_of(
    where: str,
    sample_id: str,
    group_id: str,
    output: Any,
    completion: Any,
    media: list[Medium],
    spans: list[ModalitySpan],
    place: tuple[np.ndarray, int] | None,
    settings: dict[str, Any],
    params: Any,
    logprobs_mode: str,
    tokenizer: Any,
    engine: dict[str, Any] | None,
) -> Sample:
    """A RequestOutput's completion as a sample; `where` is for errors.

    Raises: ArgumentError for kept ids that do not fit the logprobs, and for routes of other tokens.
    """
    response = [int(i) for i in completion.token_ids]
    start = len(output.prompt_token_ids)
    ids = np.array([*output.prompt_token_ids, *response], dtype=np.int64)
    steps = _steps(completion.logprobs)
    logprobs, likeliest = _logprobs(steps, response)
    kept = kept_ids(completion, steps, params, logprobs_mode, where)
    versions = [
        PolicyVersion(start + span.start, start + span.end, span.version)
        for span in completion.weight_versions or ()
    ]
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        family=settings["family"],
        input_ids=ids,
        media=media,
        modality_spans=spans,
        loss_spans=[LossSpan(start, len(ids), turn=0)],
        position_ids=None if place is None else continued_positions(*place, len(ids)),
        attention_mask=np.ones(len(ids), dtype=np.int8),
        processor=settings,
        processor_fingerprint=fingerprint(settings),
        rollout_logprobs=logprobs,
        kept_ids=kept,
        sampling={name: getattr(params, name) for name in SAMPLING_NAMES}
        | {"seed": params.seed, "logprobs": LOGPROB_KINDS[logprobs_mode]},
        finish_reason=_FINISHED.get(completion.finish_reason),
        routed_experts=_routes(completion, len(ids), where),
        policy_versions=versions or None,
        prefix_cached_tokens=output.num_cached_tokens,
        metadata={
            RESPONSE_TEXT_KEY: response_hash(tokenizer.decode(response), response),
            "argmax_ids": likeliest,
            "engine": {
                **(engine or {}),
                "request_id": output.request_id,
                "index": completion.index,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            },
        },
    )


def _steps(found: Any) -> list[Step] | None:
    """Ids, logprobs and ranks of each step, of dicts of Logprob or of vLLM's FlatLogprobs."""
    if found is None:
        return None
    if hasattr(found, "start_indices"):  # item by item it would make an object of each id
        columns = (found.token_ids, found.logprobs, found.ranks)
        ids, logprobs, ranks = (np.asarray(column) for column in columns)
        bounds = zip(found.start_indices, found.end_indices, strict=True)
        return [(ids[a:b], logprobs[a:b], ranks[a:b]) for a, b in bounds]
    return [
        (
            np.fromiter(step, np.int64, len(step)),
            np.array([of.logprob for of in step.values()]),
            np.array([of.rank for of in step.values()]),
        )
        for step in found
    ]


def _routes(completion: Any, length: int, where: str) -> np.ndarray | None:
    """Of an engine with `enable_return_routed_experts=True`."""
    rows = getattr(completion, "routed_experts", None)
    return None if rows is None else routes_of_rows(rows, length, where)


def _logprobs(
    steps: list[Step] | None, response: list[int]
) -> tuple[np.ndarray | None, list[int | None] | None]:
    """float32 [n] of the sampled ids, and the likeliest id of each step where the engine was asked for it."""
    if steps is None:
        return None, None
    sampled, likeliest = [], []
    for (ids, logprobs, ranks), token in zip(steps, response, strict=True):
        sampled.append(logprobs[np.flatnonzero(ids == token)[0]])
        first = np.flatnonzero(ranks == 1)
        likeliest.append(int(ids[first[0]]) if len(first) else None)
    return np.array(sampled, dtype=np.float32), likeliest
