"""Which rows of a pack, and which of its loss tokens, are this rank's.

Rows lie on the P ranks one range after the other, as even as they get (sizes differ by one at most), so nothing is
padded. All ranks hold the whole batch, and each cuts its own part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmpack.adapters.transformers.ulysses.exchange import gather_parts
from mmpack.packing.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


KEYWORD = "row_split"  # of the model's forward


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
