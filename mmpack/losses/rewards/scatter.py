"""Scores of samples to rewards of loss tokens: [N] float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.losses.rewards.scores import At, scatter_scores
from mmpack.schema.spans import Score

GivenRewards = (
    Tensor | np.ndarray | Sequence[float] | Sequence[Sequence[Score]] | Mapping[str, Any] | None
)


class LossBatch(Protocol):
    """The fields of a packed or padded batch that are read here."""

    sample_ids: list[str]
    cu_loss: Tensor  # [B+1]
    loss_turn: Tensor  # [N]
    loss_token_index: Tensor  # [N]
    region_rows: Tensor  # [regions, 3]: sample, start, stop on the loss axis
    rewards: list[list[Score]]  # of each sample


def scatter_rewards(
    batch: LossBatch,
    rewards: GivenRewards = None,
    *more: GivenRewards,
    weights: Mapping[str, float] | None = None,
    at: At | Mapping[str, At] = "last",
) -> Tensor:
    """The reward of each loss token, [N] float32 on the batch's device; scores that meet on a token add up.

    Args:
        batch: a PackedBatch or PaddedBatch.
        rewards: instead of `Sample.rewards`: B lists of Score, [B] numbers (scope "sequence", name "reward"), or a
            dict of name to [B] numbers. A tensor for a batch on a GPU is scattered there without waiting.
        more: the same, to be added: `batch.verifiers`, length penalties (`mp.losses.soft_overlong_scores`), another
            model's numbers.
        weights: name of a score to its factor; scores that are not named are left out. None: all, with factor 1. A name
            that no score of the batch bears is an error where scores are left out, for it may be misspelt.
        at: where a score goes within its scope: to its `last` loss token, in full to `all`, or evenly spread (`mean`).
            A dict says it by name; scores that it does not name go to the last.

    Scopes: "sequence", the sample's loss tokens; {turn: k}, those of loss spans with that turn; {region: k}, those of
    the sample's k-th region span; {span: [start, stop]}, those among these tokens of the sample. A sample without
    scores gets nothing. Where scopes overlap, scores add up in float64 in the order in which they were given, numbers
    on a GPU last: the same bits on every device. One launch for all of them.

    Raises ArgumentError where a score that is not 0 has no loss token to go to (a reward never lands on another
    sample's token), for a value (None, NaN), weight or sum that float32 can't hold, and for scores that don't fit the
    batch. Tensors for a batch on a GPU are not read: the number of a sample without a loss token goes nowhere, and a
    NaN goes to its sample's tokens.

    Example: a sample of four tokens, of which the last two are in the loss.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> ids, loss = np.array([5, 6, 7, 8]), [mp.LossSpan(2, 4)]
        >>> sample = mp.Sample("s", "g", "qwen2_vl", ids, media=[], modality_spans=[], loss_spans=loss)
        >>> batch = mp.pack([sample])
        >>> mp.scatter_rewards(batch, [1.0], at="mean")
        tensor([0.5000, 0.5000])
        >>> answer, box = mp.Score("answer", 1.0), mp.Score("box", 0.25, {"span": [2, 3]})
        >>> mp.scatter_rewards(batch, [[answer]], [[box]], at={"answer": "all"})
        tensor([1.2500, 1.0000])
    """
    if rewards is None:
        rewards = getattr(batch, "rewards", None)
    for k, source in enumerate(more):
        if source is None:
            raise ArgumentError(
                f"scatter_rewards: argument {k + 3} is {kind_of(source)}, expected scores. Fix: leave out that argument"
            )
    return scatter_scores("scatter_rewards", batch, rewards, *more, weights=weights, at=at)
