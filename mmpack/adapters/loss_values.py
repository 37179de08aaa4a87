"""Values per loss token between samples, batches and a framework's columns: their names there, and their places.

What an adapter's `to_samples` recorded of a row is in `metadata[KEY]`, with its `columns` per response token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import check_each, check_same
from mmpack.adapters.json_values import held
from mmpack.errors import ArgumentError, needs

with needs("hf", __name__):
    import torch

from mmpack.adapters.processed_media import pixels_of
from mmpack.packing.batch import Batch
from mmpack.schema.sample import Sample

# a record's key -> the framework's names of columns and those of `mp.policy_loss`
COLUMNS = {
    "trl": {
        "old_per_token_logps": "old_logprobs",
        "ref_per_token_logps": "ref_logprobs",
        "sampling_per_token_logps": "rollout_logprobs",
        "importance_sampling_ratio": "importance_sampling_ratio",
        "advantages": "advantages",
    },
    "verl": {
        "rollout_log_probs": "rollout_logprobs",
        "old_log_probs": "old_logprobs",
        "ref_log_prob": "ref_logprobs",
        "advantages": "advantages",
        "returns": "returns",
        "values": "values",
    },
    "openrlhf": {
        "rollout_log_probs": "rollout_logprobs",
        "action_log_probs": "old_logprobs",
        "base_action_log_probs": "ref_logprobs",
        "advantages": "advantages",
        "returns": "returns",
        "values": "values",
        "kl": "kl",
    },
}


def loss_columns(samples: Sequence[Sample]) -> dict[str, list[torch.Tensor]]:
    """What `to_samples` of TRL, verl or OpenRLHF recorded, for `mp.pack(…, loss_columns=…)`: a tensor [n] per sample.

    Names are those of `mp.policy_loss` (`old_logprobs`, `ref_logprobs`, `advantages`), the framework's own for others.
    Columns with one value per sample are left out. The samples bring `rollout_logprobs` themselves.

    Raises: ArgumentError for samples of which only some come from a framework.
    """
    out = {}
    for key, names in COLUMNS.items():
        known = [held(s.metadata, key) for s in samples]
        if not any(known):
            continue
        if not all(known):
            raise ArgumentError(
                f"loss_columns: only some samples come from {key}. Fix: pass samples of one batch"
            )
        for name in known[0]["columns"]:
            rows = [at_loss_tokens(s, o, name) for s, o in zip(samples, known, strict=True)]
            own = [row for row in rows if row is not None]
            if len(own) == len(rows) and names.get(name) != "rollout_logprobs":
                out[names.get(name, name)] = own
    return out


def at_loss_tokens(sample: Sample, known: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """[n] of a recorded column; None where it has no value per response token."""
    row = known["columns"].get(name)
    shift, width = places_of(known)
    if isinstance(row, list):  # TRL's, up to the completion's end
        row = torch.tensor([math.nan if v is None else v for v in row])
    elif not isinstance(row, torch.Tensor) or row.shape != (width,):
        return None
    return row[torch.from_numpy(sample.loss_indices) + shift]


def places_of(known: Mapping[str, Any]) -> tuple[int, int]:
    """What to add to a token index to get its place in a recorded column, and the column's length."""
    if "prompt_tokens" in known:
        return -known["prompt_tokens"], known["width"][1]
    return known["start"] - (known["width"] - known["actions"]), known["actions"]


def columns_of(batch: Batch, samples: Sequence[Sample]) -> dict[str, list[torch.Tensor]]:
    """A batch's `loss_columns` on the CPU, one [n] per sample.

    Raises: ArgumentError if `samples` are not those of the batch, in its order.
    """
    check_same(batch, samples)
    return {
        name: [x.detach().cpu() for x in batch.unpack_loss(values)]
        for name, values in batch.loss_columns.items()
    }


def batch_maker(from_samples: Callable[..., Any]) -> Callable[[Batch, Sequence[Sample]], Any]:
    """`from_batch` of an adapter, by its `from_samples(samples, columns, media)`."""

    def from_batch(batch: Batch, samples: Sequence[Sample]) -> Any:
        """`from_samples` of a batch of `samples`, with its pixels, and its `loss_columns` at the loss tokens.

        Raises: ArgumentError if `samples` are not those of the batch, in its order.
        """
        return from_samples(samples, columns_of(batch, samples), pixels_of(batch))

    from_batch.__module__, from_batch.__qualname__ = from_samples.__module__, "from_batch"
    return from_batch


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


def padded(
    own: torch.Tensor, keep: torch.Tensor, fill: int, padding: torch.Tensor | None
) -> torch.Tensor:
    """`own` [..., n] where `keep` bool [width] is; elsewhere the recorded `padding` if it fits, or `fill`."""
    out = own.new_full((*own.shape[:-1], len(keep)), fill)
    out[..., keep] = own
    if padding is not None and padding.shape[-1] == int((~keep).sum()):
        out[..., ~keep] = padding.to(own.dtype)
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
