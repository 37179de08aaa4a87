"""Costs of samples to costs of loss tokens, by name: [N] each, never a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.losses.constrained.named import Costs
from mmpack.losses.rewards.columns import names_of
from mmpack.losses.rewards.scatter import LossBatch
from mmpack.losses.rewards.scores import At, scatter_scores
from mmpack.losses.samples import check_batch
from mmpack.schema.spans import Cost


class CostBatch(LossBatch, Protocol):
    """The fields of a packed or padded batch that are read here."""

    costs: list[list[Cost]]  # of each sample


def scatter_costs(
    batch: CostBatch,
    costs: Costs | Sequence[Sequence[Cost]] | None = None,
    *,
    names: Sequence[str] | None = None,
    at: At = "last",
) -> Costs:
    """The cost of each loss token by name, Costs of [N] float32 on the batch's device. Scopes are those of scores.

    Args:
        batch: a PackedBatch or PaddedBatch.
        costs: instead of `Sample.costs`: Costs per sample [B], or B lists of Cost.
        names: which, in this order; None: all that the batch has. A name that no sample has is 0 everywhere, so that
            each micro-batch has the same names.
        at: where a cost goes within its scope: to its `last` loss token, in full to `all`, or evenly spread (`mean`).

    Raises ArgumentError for what is no cost (a Score, Rewards, a bare tensor), for a batch without any cost where no
    names are given, and where `scatter_rewards` does: a cost without a loss token, or that float32 can't hold.

    Example: a sample of four tokens, of which the last two are in the loss.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> ids, loss = np.array([5, 6, 7, 8]), [mp.LossSpan(2, 4)]
        >>> sample = mp.Sample("s", "g", "qwen2_vl", ids, media=[], modality_spans=[], loss_spans=loss)
        >>> sample.costs = [mp.schema.Cost("harm", 1.0)]
        >>> mp.losses.scatter_costs(mp.pack([sample])).mean()
        {'harm': 0.5}
    """
    check_batch("scatter_costs", batch)
    if isinstance(costs, Costs):
        if costs.per != "sample" or costs.shape != (len(batch.sample_ids),):
            raise ArgumentError(
                f"scatter_costs: costs are {costs!r}, but the batch has {len(batch.sample_ids)} samples. "
                "Fix: pass Costs of one number per sample, in the batch's order"
            )
        chosen = costs if names is None else costs.select(*names)
        values = {n: _scattered(batch, v, at) for n, v in chosen._values.items()}
        return Costs(values, "token")
    if names is not None:
        names_of("scatter_costs", names)
    lists = _lists(batch.costs if costs is None else costs, len(batch.sample_ids))
    if names is None:
        names = list(dict.fromkeys(cost.name for of_sample in lists for cost in of_sample))
    if not names:
        raise ArgumentError(
            "scatter_costs: no sample of the batch has a cost. "
            "Fix: record costs, or pass names=, whose costs are then 0"
        )
    by_name = {
        name: [[cost for cost in row if cost.name == name] for row in lists] for name in names
    }
    return Costs({n: _scattered(batch, rows, at) for n, rows in by_name.items()}, per="token")


def _scattered(batch: LossBatch, costs: Tensor | list[list[Cost]], at: At) -> Tensor:
    return scatter_scores("scatter_costs", batch, costs, of=Cost, name="cost", at=at)


def _lists(costs: Sequence[Sequence[Cost]], num_samples: int) -> list[list[Cost]]:
    sequence = isinstance(costs, Sequence) and not isinstance(costs, (str, bytes))
    if not sequence or len(costs) != num_samples:
        found = f"of length {len(costs)}" if sequence else kind_of(costs)
        raise ArgumentError(
            f"scatter_costs: costs is {found} for {num_samples} samples, expected Costs or a list of Cost for each. "
            "Fix: pass Costs({'name': tensor}), or [[mp.schema.Cost('name', value)], …]"
        )
    for i, of_sample in enumerate(costs):
        wrong = not isinstance(of_sample, Sequence) or isinstance(of_sample, (str, bytes))
        odd = of_sample if wrong else next((c for c in of_sample if type(c) is not Cost), None)
        if odd is not None:
            raise ArgumentError(
                f"scatter_costs: costs[{i}] holds {kind_of(odd)}, expected Cost. "
                "Fix: pass mp.schema.Cost(name, value, scope); rewards go through scatter_rewards"
            )
    return [list(of_sample) for of_sample in costs]
