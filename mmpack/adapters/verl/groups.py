"""Rows of a prompt on one rank: verl's trainer spreads the rows of a step over ranks by length alone.

In verl's batch a key is `<uid>_<session>_<index>`, and a tag has `seq_len`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

TRAINER = "verl.trainer.ppo.v1.trainer_base"


def keep_groups() -> None:
    """Where verl's trainer runs, let its `_balance_batch` keep the rows of a prompt together."""
    trainer = getattr(sys.modules.get(TRAINER), "PPOTrainer", None)
    if trainer is None or hasattr(trainer._balance_batch, "__wrapped__"):
        return
    own = trainer._balance_batch

    @wraps(own)
    def balanced(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        from verl.utils.seqlen_balancing import log_seqlen_unbalance

        batch = own(self, batch, metrics, *args, **kwargs)
        lengths = [int(tag["seq_len"]) for tag in batch.tags]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        parts = together([key.rsplit("_", 2)[0] for key in batch.keys], lengths, ranks)
        said = log_seqlen_unbalance(lengths, parts, prefix="global_seqlen")
        metrics.update({name: value for name, value in said.items() if "balanced" in name})
        batch.reorder([row for part in parts for row in part])
        return batch

    trainer._balance_batch = balanced


def together(groups: Sequence[str], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, equally many: a group is cut only where no rank has room for it. Longest groups first, each to
    the rank with the fewest tokens.

    Args: `groups`, `lengths`: the group and the tokens of each row, whose number `ranks` divides.
    """
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    room, load = [len(groups) // ranks] * ranks, [0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for rows in sorted(
        members.values(), key=lambda own: (-len(own), -sum(lengths[i] for i in own))
    ):
        while rows:
            fitting = [r for r in range(ranks) if room[r] >= len(rows)]
            rank = (
                min(fitting, key=lambda r: load[r])
                if fitting
                else max(range(ranks), key=lambda r: room[r])
            )
            taken, rows = rows[: room[rank]], rows[room[rank] :]
            parts[rank] += taken
            room[rank] -= len(taken)
            load[rank] += sum(lengths[i] for i in taken)
    return parts
