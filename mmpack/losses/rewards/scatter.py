"""Scores of samples to rewards of loss tokens: [N] float32.

Where each score lands is decided on the host, in numpy. Numbers [B] for a batch on a GPU go there in one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.rewards.scatter_op import scatter_op
from mmpack.ops.inputs import check_are_tensors
from mmpack.schema.spans import Score

At = Literal["last", "all", "mean"]


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
    rewards: Tensor | np.ndarray | Sequence[float] | Sequence[Sequence[Score]] | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    at: At = "last",
) -> Tensor:
    """The reward of each loss token, [N] float32 on the batch's device; scores that meet on a token add up.

    Args:
        batch: a PackedBatch or PaddedBatch. Scores are host data: with a batch on a GPU they make this wait for it,
            so scatter them before `batch.to`.
        rewards: instead of `Sample.rewards`: [B] numbers (scope "sequence", name "reward"), or B lists of Score. A
            tensor for a batch on a GPU is scattered there without waiting.
        weights: name of a score to its factor; scores that are not named are left out. None: all, with factor 1. A name
            that no score of the batch bears is an error where scores are left out, for it may be misspelt.
        at: where a score goes within its scope: to its `last` loss token, in full to `all`, or evenly spread (`mean`).

    Scopes: "sequence", the sample's loss tokens; {turn: k}, those of loss spans with that turn; {region: k}, those of
    the sample's k-th region span; {span: [start, stop]}, those among these tokens of the sample.

    Raises ArgumentError where a score that is not 0 has no loss token to go to (a reward never lands on another
    sample's token), for a value, weight or sum that float32 can't hold, and for overrides that don't fit the batch. On
    a GPU the values are not read: the number of a sample without a loss token goes nowhere, and a NaN goes to its
    sample's tokens.

    Example: a sample of four tokens, of which the last two are in the loss.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> ids, loss = np.array([5, 6, 7, 8]), [mp.LossSpan(2, 4)]
        >>> sample = mp.Sample("s", "g", "qwen2_vl", ids, media=[], modality_spans=[], loss_spans=loss)
        >>> mp.scatter_rewards(mp.pack([sample]), [1.0], at="mean")
        tensor([0.5000, 0.5000])
    """
    check_name("scatter_rewards", "at", at, get_args(At))
    if not hasattr(batch, "cu_loss"):
        raise ArgumentError(
            f"scatter_rewards: batch is {kind_of(batch)}, expected a PackedBatch or PaddedBatch. "
            "Fix: pass what mp.pack or mp.pad returned"
        )
    if isinstance(rewards, Tensor) and batch.cu_loss.is_cuda:
        return _scatter_on_device(batch, rewards, weights, at)
    _check_weights(weights)
    host = _Host(batch)
    out = np.zeros(host.cu[-1], dtype=np.float64)
    scores = batch.rewards if rewards is None else _overrides(rewards, len(batch.sample_ids))
    _check_names(weights, scores)
    _scatter(out, host, scores, weights, at)
    too_large = ~(np.abs(out) <= np.finfo(np.float32).max)
    if too_large.any():
        raise ArgumentError(
            f"scatter_rewards: scores add up to {out[too_large][0]:g} on a token, which float32 can't hold. "
            "Fix: weigh them less"
        )
    return torch.from_numpy(out.astype(np.float32)).to(batch.cu_loss.device)


def _scatter_on_device(
    batch: LossBatch, rewards: Tensor, weights: Mapping[str, float] | None, at: At
) -> Tensor:
    _check_overrides(rewards, len(batch.sample_ids))
    _check_weights(weights)
    _check_names(weights, [[Score(name="reward", value=0.0)]] if len(rewards) else [])
    weight = 1.0 if weights is None else weights.get("reward", 0.0)
    numbers = rewards.detach().to(batch.cu_loss.device, non_blocking=True)
    scattered: Tensor = scatter_op(numbers, batch.cu_loss, len(batch.loss_turn), weight, at)
    return scattered


class _Host:
    """The batch's loss axis in numpy."""

    def __init__(self, batch: LossBatch):
        self.sample_ids = batch.sample_ids
        self.cu = batch.cu_loss.cpu().numpy()
        self.turn = batch.loss_turn.cpu().numpy()
        self.token = batch.loss_token_index.cpu().numpy()
        self.regions = batch.region_rows.cpu().numpy()

    def places(self, sample: int, scope: str | dict[str, Any]) -> np.ndarray:
        """Loss tokens of a score's scope, as places on the loss axis; empty where it has none."""
        start, stop = self.cu[sample], self.cu[sample + 1]
        if scope == "sequence":
            return np.arange(start, stop)
        if isinstance(scope, dict) and len(scope) == 1:
            ((kind, value),) = scope.items()
            if kind == "span" and np.shape(value) == (2,) and _are_integers(*value):
                token = self.token[start:stop]
                return start + np.flatnonzero((token >= value[0]) & (token < value[1]))
            if kind == "turn" and _are_integers(value):
                turn = self.turn[start:stop]
                return start + np.flatnonzero((turn == value) & (turn >= 0))  # -1: in no turn
            if kind == "region" and _are_integers(value):
                mine = self.regions[self.regions[:, 0] == sample]
                return np.arange(*mine[value, 1:]) if 0 <= value < len(mine) else np.arange(0)
        raise ArgumentError(
            f"scatter_rewards: scope {scope!r} of sample {self.sample_ids[sample]!r} is unknown. "
            f'Fix: "sequence", {{"turn": k}}, {{"region": k}} or {{"span": [start, stop]}}'
        )


def _are_integers(*values: Any) -> bool:
    return all(isinstance(value, Integral) for value in values)


def _scatter(
    out: np.ndarray,
    host: _Host,
    scores: Sequence[Iterable[Score]],
    weights: Mapping[str, float] | None,
    at: At,
) -> None:
    for sample, of_sample in enumerate(scores):
        for score in of_sample:
            if weights is not None and score.name not in weights:
                continue
            name = f"{score.name!r} of sample {host.sample_ids[sample]!r}"
            fix = "pass a finite number, or leave the score out"
            check_number("scatter_rewards", name, score.value, fix=fix)
            value = float(score.value) * (1.0 if weights is None else weights[score.name])
            places = host.places(sample, score.scope)
            if len(places) == 0:
                if value != 0:
                    raise ArgumentError(
                        f"scatter_rewards: {name} is {score.value} for {score.scope!r}, which has no loss token. "
                        f"Fix: leave the sample out of the batch, or give the score 0"
                    )
                continue
            if at == "last":
                places = places[-1:]
            out[places] += value / len(places) if at == "mean" else value


def _check_weights(weights: Mapping[str, float] | None) -> None:
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"scatter_rewards: weights is {kind_of(weights)}, expected a dict. "
            "Fix: pass the names of scores and their factors"
        )
    for name, weight in weights.items():
        check_number("scatter_rewards", f"weights[{name!r}]", weight)


def _check_names(weights: Mapping[str, float] | None, scores: Iterable[Iterable[Score]]) -> None:
    if weights is None:
        return
    there = {score.name for of_sample in scores for score in of_sample}
    missing = sorted(weights.keys() - there, key=repr)
    left_out = sorted(there - weights.keys(), key=repr)
    if left_out and not weights:
        raise ArgumentError(
            f"scatter_rewards: weights name no score, and leave out {', '.join(map(repr, left_out))}. "
            "Fix: name those to take, or pass None to take all"
        )
    if missing and left_out:
        raise ArgumentError(
            f"scatter_rewards: weights name {missing[0]!r}, which no score of the batch bears, and leave out "
            f"{', '.join(map(repr, left_out))}. Fix: name scores as they are, with the factor 0 for those to leave out"
        )


def _overrides(rewards: Any, num_samples: int) -> list[list[Score]]:
    _check_overrides(rewards, num_samples)
    if isinstance(rewards, Tensor):
        rewards = rewards.detach().cpu().double().numpy()
    return [_scores(i, of_sample) for i, of_sample in enumerate(rewards)]


def _scores(sample: int, given: Any) -> list[Score]:
    if isinstance(given, Real) or (isinstance(given, Tensor) and given.ndim == 0):
        return [Score(name="reward", value=float(given))]
    scores = list(given) if isinstance(given, Iterable) else [given]
    if isinstance(given, str) or not all(isinstance(score, Score) for score in scores):
        raise ArgumentError(
            f"scatter_rewards: rewards[{sample}] is {given!r}, expected a number or a list of Score. "
            "Fix: pass one number per sample, or Score(name, value)"
        )
    return scores


def _check_overrides(rewards: Any, num_samples: int) -> None:
    shape = None
    if isinstance(rewards, Tensor):
        check_are_tensors("scatter_rewards", rewards=rewards)
        if rewards.is_complex():
            raise ArgumentError(
                f"scatter_rewards: rewards are {rewards.dtype}. Fix: pass real numbers"
            )
    if isinstance(rewards, (Tensor, np.ndarray)):
        shape = rewards.shape
    elif isinstance(rewards, Sequence) and not isinstance(rewards, (str, bytes)):
        shape = (len(rewards),)
    if shape is None or tuple(shape) != (num_samples,):
        found = kind_of(rewards) if shape is None else f"of shape {list(shape)}"
        raise ArgumentError(
            f"scatter_rewards: rewards is {found} for {num_samples} samples, expected one per sample. "
            f"Fix: pass [B] numbers or B lists of Score"
        )
