"""Discounted returns over segments: of loss tokens [N] by cu_loss, or of turns [K] by cu_turns."""

from __future__ import annotations

from torch import Tensor

from mmpack.errors import ArgumentError, check_number
from mmpack.losses.returns.scan_op import scan_op
from mmpack.losses.samples import check_columns
from mmpack.ops.inputs import check_are_tensors


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
    check_bootstrap("discounted_returns", bootstrap, cu)
    detached = None if bootstrap is None else bootstrap.detach()
    scanned: Tensor = scan_op(rewards.detach(), None, detached, cu, gamma, gamma, False)
    return scanned[0]


def check_bootstrap(what: str, bootstrap: Tensor | None, cu: Tensor) -> None:
    """Raise ArgumentError unless it is None or one float for each segment."""
    check_are_tensors(what, ("bootstrap",), bootstrap=bootstrap)
    if bootstrap is not None and (
        bootstrap.shape != (len(cu) - 1,)
        or bootstrap.device != cu.device
        or not bootstrap.is_floating_point()
    ):
        raise ArgumentError(
            f"{what}: bootstrap has shape {list(bootstrap.shape)} and dtype {bootstrap.dtype} on {bootstrap.device}, "
            f"expected [{len(cu) - 1}] floats on {cu.device}. Fix: pass one value per sample"
        )
