"""What every peer is given: the same samples, advantages and budgets; and what its forward gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step.work import Work
from mmpack.adapters.torch.order import groups_in
from mmpack.planning.plan import plan
from mmpack.schema.sample import Sample

MAX_ROWS = 40_960  # of a pack
TINY_ROWS = 700


@dataclass(frozen=True)
class Job:
    """One batch of a training step, of which rank `rank` runs its part.

    `advantages`: float32 [B] on `device`. `max_rows`: of a pack.
    """

    samples: list[Sample]
    advantages: torch.Tensor
    device: torch.device
    max_rows: int
    rank: int = 0
    ranks: int = 1

    @property
    def total_tokens(self) -> int:
        return sum(s.num_loss_tokens for s in self.samples)

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    def groups(self) -> list[list[int]]:
        """Each prompt's samples, of all ranks."""
        return groups_in([sample.group_id for sample in self.samples])

    def own_groups(self) -> list[list[int]]:
        """This rank's groups, one a micro-batch."""
        return self.groups()[self.rank :: self.ranks]

    def bins(self, share_prefix: bool, max_rows: int) -> list[list[int]]:
        """This rank's packs."""
        planned = plan(
            self.samples, max_tokens=max_rows, ranks=self.ranks, share_prefix=share_prefix
        )
        return [planned.bins[b] for b in planned.ranks[self.rank]]

    def of(self, members: list[int]) -> tuple[list[Sample], torch.Tensor]:
        """Samples and their advantages."""
        chosen = torch.tensor(members, device=self.device)
        return [self.samples[i] for i in members], self.advantages[chosen]


@dataclass(frozen=True)
class Outcome:
    """`loss`: this micro-batch's part of −Σ advantage · logprob / total_tokens. `logprobs`: makes [N], in order."""

    loss: torch.Tensor
    work: Work
    logprobs: Callable[[], Any] | None
