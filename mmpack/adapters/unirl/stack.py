"""UniRL's train stack on mmpack's replay, and its micro-batches by mmpack's plan.

A stack holds an algorithm, which holds a stage. AR, async, agentic and SFT trainers all build one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from unirl.algorithms.base import typed_conditions
from unirl.distributed.group.dispatch import DISPATCH_MODE_REGISTRY, Dispatch, distributed
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner.packed import TokenBudgetPlanner, _sync_micro_count
from unirl.train.stack.planner.types import _update_ranges
from unirl.types.sample import Part

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.micro_batches import bins, together
from mmpack.adapters.unirl.replay import Replay
from mmpack.errors import ArgumentError, check_whole
from mmpack.schema.sample import Sample

WHERE = "UniRL stack"
WHOLE_GROUPS = "mmpack: whole groups"  # a way of UniRL's dispatch, beside its own


class Stack(TrainStack):
    """UniRL's `TrainStack`, enabled: `stack._target_: mmpack.adapters.unirl.Stack` in a recipe. Raises as `enable`."""

    def __init__(self, *, max_tokens: int | None = None, **options: Any):
        super().__init__(**options)
        self.replay = enable(self, max_tokens=max_tokens)

    @distributed(dispatch_mode=WHOLE_GROUPS)
    def train_track(self, *args: Any, **options: Any) -> Any:
        """UniRL's, on a rank's part of what its driver dealt by `whole_groups`."""
        return super().train_track(*args, **options)


def whole_groups(
    handle: Any, args: tuple[Any, ...], options: dict[str, Any], size: int | None
) -> Any:
    """UniRL's DP_SCATTER, in its driver; a part whose `balance_shards` took groups apart is dealt again before.

    Then the samples of a prompt go to one rank, where it has room for them, and ranks have equally many samples and
    nearly equally many tokens of responses. Raises: ArgumentError for a number of samples that ranks don't divide.
    """
    if size is not None and size % handle.dp_size:
        raise ArgumentError(
            f"{WHERE}: {handle.dp_size} ranks don't divide {size} samples. Fix: change batch_size or num_devices"
        )
    dealt = tuple(_dealt(a, handle.dp_size) if isinstance(a, Part) else a for a in args)
    return DISPATCH_MODE_REGISTRY[Dispatch.DP_SCATTER]["dispatch_fn"](handle, dealt, options, size)


def _dealt(part: Any, ranks: int) -> Any:
    roots = _roots(part)
    if len([*groupby(roots)]) == len(set(roots)):
        return part
    parts = together(roots, part.segment.lengths.tolist(), ranks)
    return part.select([row for rows in parts for row in rows])


def _roots(part: Any) -> list[str]:
    """The prompt of each sample, which is the first of its ancestors."""
    return [name.split("/")[0] for name in part.sample_ids]


DISPATCH_MODE_REGISTRY[WHOLE_GROUPS] = DISPATCH_MODE_REGISTRY[Dispatch.DP_SCATTER] | {
    "dispatch_fn": whole_groups
}


class Planner:
    """UniRL's `MicroPlanner`: samples of one prompt meet in a micro-batch, and rows that they share count once.

    Each update has the samples that UniRL gives it, and ranks run equal numbers of micro-batches. UniRL weights a
    micro-batch by its samples or tokens, so that losses and gradients don't depend on the cut.
    """

    def __init__(self, algorithm: Any, replay: Replay, max_tokens: int | None = None):
        self.algorithm, self.replay, self.max_tokens = algorithm, replay, max_tokens

    def arrange(self, part: Any, *, num_updates: int, micro_batch_size: int) -> Any:
        """UniRL's: the part in another order, and (start, stop) of each micro-batch of each update."""
        conditions = typed_conditions(part.conditions, self.algorithm.conditions_cls)
        samples = self.replay.samples(conditions, part.segment)
        if part.sample_ids:
            samples = [replace(s, group_id=r) for s, r in zip(samples, _roots(part), strict=True)]
        order, updates = list[int](), []
        for start, stop in _update_ranges(total_size=len(samples), num_updates=num_updates):
            micros = []
            rows = self._rows(samples[start:stop], micro_batch_size)
            for own in bins(samples[start:stop], rows, _sync_micro_count):
                micros.append((len(order), len(order) + len(own)))
                order += [start + i for i in own]
            updates.append(micros)
        return part.select(order), updates

    def _rows(self, samples: Sequence[Sample], micro_batch_size: int) -> int:
        """Rows of a micro-batch: what is asked for, or what UniRL's padded one has; at least those of one sample."""
        longest = max(map(len, samples))
        if self.max_tokens is not None:
            return max(self.max_tokens, longest)
        starts = [s.loss_spans[0].start for s in samples]
        lengths = [len(s) - a for s, a in zip(samples, starts, strict=True)]
        return micro_batch_size * (max(starts) + max(lengths))


def enable(stack: Any, *, max_tokens: int | None = None) -> Replay:
    """Let a UniRL `TrainStack` replay through mmpack and plan its micro-batches, from now on.

    Logprobs, values, losses and gradients are those of stock replay within the contract; pictures are encoded once per
    micro-batch and prompt rows shared. `stop()` gives the stack its own replay and planner back.

    Args:
        max_tokens: rows of a micro-batch, shared ones counted once. None: the recipe's `token_budget`, or else as many
            as its padded micro-batch of `micro_batch_size` samples has.

    Raises: ModelError for what mmpack can't serve: other stages, sequence parallelism, `shuffle_updates`, and a stack
    that is enabled already.
    """
    if max_tokens is not None:
        check_whole("enable", "max_tokens", max_tokens)
    updates = stack.update_planner
    shuffled = updates.shuffle_updates and stack.num_updates_per_batch > 1
    options = (
        ("sp_size", getattr(stack.fsdp_backend, "_sp_size", 1) > 1, "set fsdp_cfg.sp_size: 1"),
        ("shuffle_updates", shuffled, "leave it out: it takes groups apart"),
    )
    refuse_on(WHERE, options)
    own = updates.micro_planner
    if max_tokens is None and isinstance(own, TokenBudgetPlanner):
        max_tokens = own.token_budget
    replay = Replay(stack.algorithm.stage)
    replay.put(updates, "micro_planner", Planner(stack.algorithm, replay, max_tokens))
    return replay
