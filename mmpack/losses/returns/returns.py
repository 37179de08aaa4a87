"""Discounted returns and GAE over segments: of loss tokens [N] by cu_loss, or of turns [K] by cu_turns.

Both are one suffix scan, the op mmpack::segment_returns, float64 inside.
On each segment of cu, with d = rewards (values absent) or rewards + gamma · the next value − value:
out[0, t] = sum over k of decay^k · d[t + k]; with values out[1] = out[0] + values. The next value of a segment's last
element is its bootstrap (0 without one); without values gamma · bootstrap is added to the last reward. Results are
float32, or `wide` as summed: a group's returns may be closer to each other than float32 tells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import check_number
from mmpack.losses.returns import SEGMENT_RETURNS
from mmpack.losses.samples import check_column, check_columns
from mmpack.ops.custom_op import by_backend, define_op


def discounted_returns(
    rewards: Tensor, cu: Tensor, gamma: float = 1.0, bootstrap: Tensor | None = None
) -> Tensor:
    """R_t = rewards_t + gamma · R_{t+1} within each segment: [N] float32, without gradient. One launch on a GPU.

    Args: rewards: [N] float, of loss tokens or of turns. cu: [B+1] int offsets of the segments, `batch.cu_loss` or
    `turns.cu_turns`. gamma: from 0 to 1. bootstrap: [B] float, the return after each segment's last element, for those
    that were cut off; None: 0, they ended.

    Sums are float64, and a segment's bits do not depend on the others; a NaN stays in its segment. Raises
    ArgumentError for shapes that don't fit and numbers out of their range.

    Example: two trajectories, of three turns and of one.
        >>> import torch
        >>> import mmpack as mp
        >>> cu_turns = torch.tensor([0, 3, 4])
        >>> mp.discounted_returns(torch.tensor([0.0, 1.0, 4.0, 2.0]), cu_turns, gamma=0.5)
        tensor([1.5000, 3.0000, 4.0000, 2.0000])
    """
    check_columns("discounted_returns", cu, {"rewards": rewards}, offsets="cu")
    check_number("discounted_returns", "gamma", gamma, least=0, most=1)
    after = _bootstrap("discounted_returns", bootstrap, cu)
    scanned: Tensor = scan_op(rewards.detach(), None, after, cu, gamma, gamma, False)
    return scanned[0]


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_loss: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [N] float32, without gradient (arXiv 1506.02438 eq. 16).

    A_t = sum over k of (gamma · lam)^k · δ_{t+k}, δ_t = rewards_t + gamma · values_{t+1} - values_t,
    returns = A + values. The next token of a loss token is the sample's next loss token, past any observation
    between them.

    Args: rewards, values: [N] float. bootstrap: [B], the value after each sample's last loss token, for samples that
    were cut off; None: 0, they ended. gamma, lam: from 0 to 1. One launch on a GPU. Raises ArgumentError for shapes
    that don't fit and numbers out of their range.

    Example: two samples of two loss tokens and one.
        >>> import torch
        >>> import mmpack as mp
        >>> cu_loss = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.5, 1.0])
        >>> mp.gae(rewards, values, cu_loss, gamma=1.0, lam=0.5)
        (tensor([0.2500, 0.5000, 1.0000]), tensor([0.7500, 1.0000, 2.0000]))
    """
    check_columns("gae", cu_loss, {"rewards": rewards, "values": values})
    for name, number in (("gamma", gamma), ("lam", lam)):
        check_number("gae", name, number, least=0, most=1)
    after = _bootstrap("gae", bootstrap, cu_loss)
    scanned: Tensor = scan_op(
        rewards.detach(), values.detach(), after, cu_loss, gamma, gamma * lam, False
    )
    return scanned[0], scanned[1]


def _bootstrap(what: str, bootstrap: Tensor | None, cu: Tensor) -> Tensor | None:
    """Detached. Raises ArgumentError unless it is None or one float for each segment."""
    if bootstrap is None:
        return None
    fix = "pass one value per sample"
    check_column(what, "bootstrap", bootstrap, len(cu) - 1, "floats", cu, fix)
    return bootstrap.detach()


def _fake(
    rewards: Tensor,
    values: Tensor | None,
    bootstrap: Tensor | None,
    cu: Tensor,
    gamma: float,
    decay: float,
    wide: bool,
) -> Tensor:
    dtype = torch.float64 if wide else torch.float32
    return rewards.new_empty((1 if values is None else 2, len(rewards)), dtype=dtype)


# rewards, values [N] and bootstrap [B]: floats; cu [B+1]. Result: [1, N] float32 (wide: float64), [2, N] with values.
scan_op = define_op("segment_returns", by_backend(SEGMENT_RETURNS, "segment_returns"), _fake)
