"""The critic's loss over compact loss tokens: values and returns [N], samples cut by cu_loss [B+1]."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number
from mmpack.losses.aggregate import Aggregation, Total, aggregate
from mmpack.losses.samples import check_columns


def value_loss(
    values: Tensor,
    returns: Tensor,
    cu_loss: Tensor,
    old_values: Tensor | None = None,
    clip: float | None = None,
    aggregation: Aggregation = "token_mean",
    total_tokens: Total | None = None,
    total_samples: Total | None = None,
    scale: float = 1.0,
    *,
    max_tokens: int | None = None,
) -> Tensor:
    """scale · aggregate(½ (values - returns)²), a scalar float32.

    With `clip` each term is ½ max((values - returns)², (old_values + clip(values - old_values, ±clip) - returns)²), the
    clipped value loss of PPO's reference code. All columns are [N]; totals and names as in `aggregate`; N = 0 gives
    a zero that is attached to the graph. Raises ArgumentError for shapes that don't fit, numbers out of their range,
    and unless old_values and clip come together.

    Example: two samples of two loss tokens and one.
        >>> import torch
        >>> import mmpack as mp
        >>> cu_loss = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> mp.value_loss(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([1.0, 1.0, 2.0]), cu_loss)
        tensor(0.2500)
    """
    columns = {"values": values, "returns": returns, "old_values": old_values}
    check_columns("value_loss", cu_loss, columns, optional=("old_values",))
    check_number("value_loss", "scale", scale, least=0)
    if (old_values is None) != (clip is None):
        raise ArgumentError(
            "value_loss: old_values and clip must be passed together. Fix: pass both, or neither for no clipping"
        )
    if clip is not None:
        check_number("value_loss", "clip", clip, least=0, finite=False)
    v, target = values.double(), returns.detach().double()
    terms = (v - target).square()
    if old_values is not None and clip is not None:
        old = old_values.detach().double()
        near = old + (v - old).clamp(-clip, clip)
        terms = torch.maximum(terms, (near - target).square())
    total = aggregate(
        terms / 2,
        cu_loss,
        aggregation,
        total_tokens=total_tokens,
        total_samples=total_samples,
        max_tokens=max_tokens,
    )
    return (scale * total).float()
