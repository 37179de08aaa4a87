"""Collectives with gradients: heads for rows and back, rows by counts, and what every rank gets whole.

P ranks; T rows of all, t of this rank. Each backward is the transposed exchange, so a rank's gradients are those of
its own rows: their sum over the ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Counts = Sequence[int]


def to_heads(x: Tensor, rows: Counts, group: ProcessGroup) -> Tensor:
    """[t, P, C], own rows of all ranks' heads -> [T, C], all rows of this rank's heads. `rows` [P]: of each rank."""
    own, ranks, width = x.shape
    flat = x.transpose(0, 1).reshape(ranks * own, width)
    return send_rows(flat, [own] * ranks, rows, group)


def to_rows(x: Tensor, rows: Counts, group: ProcessGroup) -> Tensor:
    """`to_heads` backwards: [T, C] -> [t, P, C]."""
    own = rows[torch.distributed.get_rank(group)]
    back = send_rows(x, rows, [own] * len(rows), group)
    return back.view(len(rows), own, x.shape[1]).transpose(0, 1).contiguous()


def send_rows(x: Tensor, sent: Counts, received: Counts, group: ProcessGroup) -> Tensor:
    """Rows [sum of `sent`, C], those for each rank one after the other -> [sum of `received`, C], by the sender."""
    out: Tensor = _SendRows.apply(x, sent, received, group)
    return out


def gather_parts(
    x: Tensor, order: Tensor, own: Tensor, counts: Counts, group: ProcessGroup
) -> Tensor:
    """Every rank's [n, C] -> [N, C] on each; a rank's gradient is that of its own part, from its own loss.

    Args: `order` [N]: places in the parts, one after the other. `own` [n]: places of this rank's part in the result.
    `counts` [P]: of each rank.
    """
    out: Tensor = _Gather.apply(x, order, own, counts, group)
    return out


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Counts, received: Counts, group: ProcessGroup) -> Tensor:
        ctx.given = received, sent, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, *ctx.given), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, own: Tensor, counts: Counts, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(own)
        ranks, most = len(counts), max(counts)
        mine = x.new_zeros(most, *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(parts, mine, group=group)
        joined = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
        return joined[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return grad[own], None, None, None, None


def _exchanged(x: Tensor, sent: Counts, received: Counts, group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    torch.distributed.all_to_all_single(
        out, x.contiguous(), list(received), list(sent), group=group
    )
    return out
