"""From terms [N], one per loss token, to one number.

Totals are of the global batch, so that the parts of micro-batches and ranks add up to the whole.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number
from mmpack.losses.samples import check_columns, sample_mean
from mmpack.ops.inputs import can_look_at

Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "token_sum",
]
Total = int | float | Tensor
SAMPLE_MEAN = "sequence_mean_token_mean"


def aggregate(
    terms: Tensor,
    cu_loss: Tensor,
    aggregation: Aggregation = "token_mean",
    *,
    total_tokens: Total | None = None,
    total_samples: Total | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Sum terms [N] into a scalar float64.

    - `token_mean`: sum / total_tokens (DAPO, arXiv 2503.14476 eq. 8; PPO)
    - `sequence_mean_token_mean`: each sample's mean, their sum / total_samples (GRPO, arXiv 2402.03300 eq. 3; GSPO)
    - `sequence_mean_token_sum`: sum / total_samples
    - `sequence_mean_token_sum_norm`: sum / (total_samples · max_tokens) (Dr. GRPO, arXiv 2503.20783 app. A)
    - `token_sum`: sum

    Totals are of the global batch, over all micro-batches and ranks; None: this batch's. A sample without loss
    tokens adds nothing and counts in total_samples. An empty batch gives 0. Raises ArgumentError for an unknown name,
    for a missing max_tokens (the longest response that generation allows), and for totals below this batch's own;
    those on a GPU are not looked at, and count as 1 at least.
    """
    check_columns("aggregate", cu_loss, {"terms": terms})
    total, factor = denominator(
        aggregation, len(terms), len(cu_loss) - 1, total_tokens, total_samples, max_tokens
    )
    per_sample = aggregation == SAMPLE_MEAN
    summed = sample_mean(terms, cu_loss).sum() if per_sample else terms.double().sum()
    return summed / (at_least_one(total) * factor)


def denominator(
    aggregation: Aggregation,
    count: int,
    num_samples: int,
    total_tokens: Total | None,
    total_samples: Total | None,
    max_tokens: int | None,
) -> tuple[Total, int]:
    """What the sum over `count` tokens, or over the samples' means, is divided by: at_least_one(total) · factor."""
    check_name("aggregate", "aggregation", aggregation, get_args(Aggregation))
    _check_total("total_tokens", total_tokens, count, "loss tokens")
    _check_total("total_samples", total_samples, num_samples, "samples")
    normed = aggregation == "sequence_mean_token_sum_norm"
    if max_tokens is not None:
        check_number("aggregate", "max_tokens", max_tokens, least=1)
    if normed != (max_tokens is not None):
        raise ArgumentError(
            f"aggregate: aggregation is {aggregation!r} and max_tokens {max_tokens}. "
            f"Fix: pass max_tokens with sequence_mean_token_sum_norm, and only with it"
        )
    if aggregation == "token_sum":
        return 1, 1
    if aggregation == "token_mean":
        return count if total_tokens is None else total_tokens, 1
    return num_samples if total_samples is None else total_samples, max_tokens or 1


def at_least_one(total: Total) -> float | Tensor:
    """A batch without a loss token or sample has the loss 0."""
    if isinstance(total, Tensor):
        return total.to(torch.float64).clamp(min=1.0)
    return float(max(total, 1))


def _check_total(name: str, total: Total | None, own: int, of: str) -> None:
    if isinstance(total, Tensor):
        if total.numel() != 1:
            raise ArgumentError(
                f"aggregate: {name} has shape {list(total.shape)}, expected one number. Fix: pass its sum"
            )
        if not can_look_at(total):
            return
        total = total.item()
    if total is None:
        return
    fix = f"pass that of the global batch, which holds this one's {own} {of}"
    check_number("aggregate", name, total, least=own, fix=fix)
