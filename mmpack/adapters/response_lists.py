"""Kept ids as rollouts hand them over, one list per response token, for the tokens that a row is scored on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, one_line
from mmpack.schema.ragged import Ragged, RaggedSpec

KEPT_IDS = "kept_ids"  # the field's name in every framework
_SPEC = RaggedSpec()


def response_lists(given: Any, count: int, where: str) -> Ragged:
    """`count` lists of ids: a Ragged, a dict of its `offsets` and `ids`, or a list per token. Raises ArgumentError."""
    try:
        if isinstance(given, Ragged | Mapping):
            made = _SPEC.read(given if isinstance(given, Ragged) else dict(given), KEPT_IDS)
        else:
            made = Ragged.of(given)
    except (ArgumentError, TraceError) as error:
        raise ArgumentError(f"{where}: {one_line(str(error))}") from None
    if len(made) != count:
        raise ArgumentError(
            f"{where}: kept_ids has {len(made)} lists for {count} response tokens. Fix: pass one list per token, "
            "an empty one where nothing was sampled"
        )
    return made


def refuse_missing(lists: Ragged, sampled: np.ndarray, where: str) -> None:
    """Raise ArgumentError where a sampled token has an empty list. `sampled`: bool, one per list."""
    missing = np.flatnonzero((lists.lengths == 0) & sampled)
    if len(missing):
        raise ArgumentError(
            f"{where}: kept_ids is empty at response token {missing[0]}, which was sampled. "
            "Fix: pass the ids that the sampler left there"
        )


def scored_lists(lists: Ragged, tokens: np.ndarray, ids: np.ndarray) -> Ragged:
    """The lists of some response tokens; an empty one, of a token that was observed, becomes the token itself.

    A framework scores observed tokens too, and masks them: their logprob is then 0.

    Args: `tokens`: int64 [n], indices in the response. `ids`: int [n], the ids of these tokens.
    """
    own = lists[tokens]
    empty = own.lengths == 0
    filled = np.insert(own.ids, own.offsets[:-1][empty], ids[empty].astype(np.int32))
    offsets = np.concatenate([[0], np.cumsum(np.where(empty, 1, own.lengths))])
    return Ragged(offsets.astype(np.int64), filled)


def ragged_of(support: Any) -> Ragged:
    """A batch's lists, on the host."""
    return Ragged(support.offsets.cpu().numpy(), support.ids.cpu().numpy().astype(np.int32))
