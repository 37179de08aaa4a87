"""Weights for the gap between the engine that sampled and the trainer that scores: truncated (TIS) or masked (MIS)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number
from mmpack.losses.kl import LOG_RATIO_BOUND
from mmpack.losses.samples import check_columns, per_token, sample_mean
from mmpack.ops.segments import segment_sum

Correction = Literal["tis", "mis"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    cu_loss: Tensor,
    kind: Correction = "tis",
    level: CorrectionLevel = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Importance weights w = exp(old - rollout), kept within [low, high].

    Level `token`: of each token. `sequence`: of a sample, exp of the sum over its loss tokens. `geometric`: exp of
    their mean. Kind `tis` cuts w to [low, high] (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"); `mis` sets w outside [low, high] to 0 (Liu et al. 2025, "When speed kills stability").

    Returns the weights [N] float64, without gradient, and which of them were cut or masked, [N] bool. Raises
    ArgumentError for unknown names, bounds that bound nothing and columns that don't fit cu_loss.
    """
    check_correction(kind, level, low, high)
    columns = {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs}
    check_columns("correction_weights", cu_loss, columns)
    gap = old_logprobs.detach().double() - rollout_logprobs.detach().double()
    if level != "token":
        by_sample = (segment_sum if level == "sequence" else sample_mean)(gap, cu_loss)
        gap = per_token(by_sample, cu_loss, len(gap))
    weights = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    outside = (weights < low) | (weights > high)
    if kind == "tis":
        return weights.clamp(low, high), outside
    return torch.where(outside, 0.0, weights), outside


def check_correction(kind: str | None, level: str, low: float, high: float) -> None:
    """Raise ArgumentError for unknown names, and with a kind for bounds that bound nothing."""
    check_name("correction_weights", "level", level, get_args(CorrectionLevel))
    check_number("correction_weights", "low", low, least=0)
    check_number("correction_weights", "high", high, least=0, finite=False)
    if kind is None:
        return
    check_name("correction_weights", "kind", kind, get_args(Correction))
    if not low < high:
        raise ArgumentError(
            f"correction_weights: low is {low}, high is {high}. Fix: pass low below high, both above 0"
        )
