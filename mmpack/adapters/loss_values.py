"""Values per loss token on the way from a batch to a framework's columns: their names there, and their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import check_each, check_same
from mmpack.errors import needs

with needs("hf", __name__):
    import torch

from mmpack.packing.batch import Batch
from mmpack.schema.sample import Sample


def columns_of(batch: Batch, samples: Sequence[Sample]) -> dict[str, list[torch.Tensor]]:
    """A batch's `loss_columns` on the CPU, one [n] per sample.

    Raises: ArgumentError if `samples` are not those of the batch, in its order.
    """
    check_same(batch, samples)
    return {
        name: [x.detach().cpu() for x in batch.unpack_loss(values)]
        for name, values in batch.loss_columns.items()
    }


def values_by_name(
    sample: Sample, given: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The framework's names -> values [n] at a sample's loss tokens: `given`, and the sample's rollout_logprobs.

    Args: `given`: by the names of `mp.policy_loss`, or the framework's own. `names`: the framework's names -> those of
    `mp.policy_loss`; one of them is `rollout_logprobs`. Raises: ArgumentError for another number of values.
    """
    theirs = {own: name for name, own in names.items()}
    out = {theirs.get(k, k): torch.as_tensor(v) for k, v in given.items()}
    if sample.rollout_logprobs is not None:
        rollout = torch.from_numpy(sample.rollout_logprobs)
        out.setdefault(theirs["rollout_logprobs"], rollout)
    check_each(f"from_samples: {sample.sample_id}", sample.num_loss_tokens, "loss tokens", out)
    return out


def write_at(
    columns: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    places: torch.Tensor,
    width: int,
) -> dict[str, torch.Tensor]:
    """`columns` [width] with `values` [n] written at `places` [n]; a column that is not there is 0 elsewhere."""
    out = dict(columns)
    for name, own in values.items():
        column = out[name].clone() if name in out else own.new_zeros(width)
        column[places] = own.to(column.dtype)
        out[name] = column
    return out


def rectangle(
    values: torch.Tensor, batch: Batch, starts: Sequence[int], columns: int
) -> torch.Tensor:
    """Values [N] of loss tokens as [B, columns], 0 elsewhere. `starts`: the column of each sample's token 0."""
    first = [b * columns + start for b, start in enumerate(starts)]
    counts = torch.tensor(batch.loss_counts, device=values.device)
    at = torch.repeat_interleave(torch.tensor(first, device=values.device), counts)
    out = values.new_zeros(len(first) * columns)
    return out.index_copy(0, at + batch.loss_token_index.long(), values).view(-1, columns)
