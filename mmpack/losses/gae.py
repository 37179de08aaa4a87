"""Generalised advantage estimation over compact loss tokens [N], each sample by itself."""

from __future__ import annotations

from torch import Tensor

from mmpack.errors import check_number
from mmpack.losses.returns.returns import check_bootstrap
from mmpack.losses.returns.scan_op import scan_op
from mmpack.losses.samples import check_columns


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
    check_bootstrap("gae", bootstrap, cu_loss)
    after = None if bootstrap is None else bootstrap.detach()
    scanned: Tensor = scan_op(
        rewards.detach(), values.detach(), after, cu_loss, gamma, gamma * lam, False
    )
    return scanned[0], scanned[1]
