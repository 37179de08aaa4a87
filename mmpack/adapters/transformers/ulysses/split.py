"""Which rows of a pack, and which of its loss tokens, are this rank's; and how ranks exchange rows and heads.

Rows lie on the P ranks one range after the other, as even as they get (sizes differ by one at most), so nothing is
padded. All ranks hold the whole batch, and each cuts its own part.

Exchanges: P ranks; T rows of all, t of this rank. A rank's gradients are those of its own rows: their sum over the
ranks is the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.packing.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


KEYWORD = "row_split"  # of the model's forward
Counts = Sequence[int]  # of each rank


@dataclass(frozen=True, eq=False)
class RowSplit:
    """The rows and loss tokens of a batch by rank."""

    group: ProcessGroup
    rank: int
    bounds: tuple[int, ...]  # [P + 1]: rank r has rows bounds[r] to bounds[r + 1]
    owner: np.ndarray  # [N]: the rank of each loss token

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [b - a for a, b in pairwise(self.bounds)]

    @property
    def own(self) -> slice:
        """This rank's rows."""
        return slice(*self.bounds[self.rank : self.rank + 2])

    def rank_of(self, rows: np.ndarray) -> np.ndarray:
        """The rank of each row."""
        return np.searchsorted(self.bounds[1:], rows, side="right")

    def own_loss(self, batch: Batch) -> Batch:
        """The batch with this rank's loss tokens alone, whose rows are counted from its own first one."""
        mine = torch.from_numpy(np.flatnonzero(self.owner == self.rank)).to(batch.device)
        rows = batch.loss_rows[mine] - self.bounds[self.rank]
        unique, inverse = rows.unique(return_inverse=True)
        return dataclasses.replace(
            batch,
            loss_rows=rows,
            loss_targets=batch.loss_targets[mine],
            loss_rows_unique=unique,
            loss_row_inverse=inverse.to(torch.int32),
            kept_ids=None if batch.kept_ids is None else batch.kept_ids[mine],
        )

    def gather(self, values: Tensor) -> Tensor:
        """Each rank's [n, C] of its loss tokens -> [N, C] of all, on every rank."""
        places = np.argsort(self.owner, kind="stable")  # in the parts, one after the other
        counts = np.bincount(self.owner, minlength=self.ranks).tolist()
        order = torch.from_numpy(np.argsort(places)).to(values.device)
        own = torch.from_numpy(np.flatnonzero(self.owner == self.rank)).to(values.device)
        return gather_parts(values, order, own, counts, self.group)


# ---- collectives with gradients: each backward is the transposed exchange ------------------------------


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
