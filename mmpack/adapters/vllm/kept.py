"""The ids that vLLM's sampler kept, one list per sampled token, and what must hold for them to mean anything.

Model Runner V2 hands them back (`return_sampling_mask=True`). Where it does not run, a CPU without Triton, they are
read off the logprobs: in mode `processed_logprobs` an id that top-k, top-p or min-p took out has −inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.adapters.rendered import kept_lists
from mmpack.errors import ArgumentError
from mmpack.schema.ragged import Ragged

PROCESSED = "processed_logprobs"
EVERY_ID = -1  # of SamplingParams.logprobs
TIES = 64  # more ids than top_k are asked for: ids that tie with the last are kept too
# settings that move logits, and the value that leaves them alone: no softmax over the kept ids gives their logprobs
_MOVES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}
# of one sampled token: ids, their logprobs and ranks
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


def kept_ids(
    completion: Any, steps: Sequence[Step] | None, params: Any, logprobs_mode: str, where: str
) -> Ragged | None:
    """A list per token of `completion`, or None where the engine was not asked for them, or nothing was taken out.

    Args: `steps`: the completion's logprobs. `logprobs_mode`: the engine's.

    Raises: ArgumentError where logprobs are raw, so not those of the kept ids; where penalties or biases moved the
    logits; and where more ids may have been kept than were asked for.
    """
    mask = completion.sampling_mask
    if mask is None and not (_filtered(params) and _asked_for_all(params, logprobs_mode)):
        return None
    check_unmoved(params, where)
    if mask is not None:
        kind = {"logprobs": "processed" if logprobs_mode == PROCESSED else "raw"}
        return kept_lists(mask.token_ids, len(completion.token_ids), kind, where)
    return _finite(steps, params, where)


def check_unmoved(params: Any, where: str) -> None:
    """Raise ArgumentError if penalties or biases moved the logits. `params`: SamplingParams."""
    moved = [name for name, off in _MOVES.items() if (getattr(params, name, None) or off) != off]
    if moved:
        raise ArgumentError(
            f"{where} was sampled with {moved[0]}={getattr(params, moved[0])}, so its logprobs are not a "
            f"softmax over its kept ids. Fix: sample without {moved[0]}"
        )


def asked_logprobs(top_k: int, vocabulary: int, every_id: bool) -> int:
    """`SamplingParams.logprobs` from which kept ids can be read.

    Every id, or, where `top_k` bounds them, that many and some that may tie. `every_id`: even then; in 16 bits any
    number of ids may tie.
    """
    bounded = 0 < top_k < vocabulary - TIES and not every_id
    return top_k + TIES if bounded else EVERY_ID


def _filtered(params: Any) -> bool:
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return bool(cut and params.temperature > 0)


def _asked_for_all(params: Any, logprobs_mode: str) -> bool:
    if logprobs_mode != PROCESSED or params.logprobs is None:
        return False
    return bool(params.logprobs == EVERY_ID or params.logprobs > params.top_k > 0)


def _finite(steps: Sequence[Step] | None, params: Any, where: str) -> Ragged:
    """The ids of finite logprobs. They are all if every id was asked for, or if one that is not kept came too."""
    if steps is None:
        return Ragged.empty(0)
    lists = []
    for n, (ids, logprobs, _) in enumerate(steps):
        kept = np.isfinite(logprobs)
        if kept.all() and params.logprobs != EVERY_ID:
            raise ArgumentError(
                f"{where}, token {n}: all of the {params.logprobs} likeliest ids are kept, and more may be. "
                f"Fix: use SamplingParams(logprobs={EVERY_ID})"
            )
        lists.append(np.unique(ids[kept]))
    return Ragged.of(lists)
