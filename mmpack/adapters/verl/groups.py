"""Rows of a prompt on one rank: verl's trainer spreads the rows of a step over ranks by length alone.

In verl's batch a key is `<uid>_<session>_<index>`, and a tag has `seq_len`.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from mmpack.adapters.micro_batches import together

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
