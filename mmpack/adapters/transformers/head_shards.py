"""A head whose vocabulary torch's tensor parallel splits over ranks: this rank's rows of it, and the ranks.

Its weight is a DTensor while the forward runs: of `parallelize_module`, of transformers' `tp_plan`, or what FSDP2
gathers on a mesh of two dimensions. FSDP2 alone has the plain weight there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmpack.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Head(NamedTuple):
    """What `linear_selected_logprobs` takes of a head and its input."""

    hidden: torch.Tensor  # [T, H], whole
    weight: torch.Tensor  # [V / ranks, H]
    bias: torch.Tensor | None
    group: ProcessGroup | None  # None: the weight is whole


def is_split(head: Any) -> bool:
    """Whether a DTensor holds the head's weight now."""
    return _is_dtensor(getattr(head, "weight", None))


def local_head(head: Any, hidden: torch.Tensor) -> Head:
    """Of a Linear whose forward runs; hidden [..., H] as that forward gets it.

    Raises: ModelError for a weight that is not split by rows, or not evenly.
    """
    weight, bias = head.weight, head.bias
    if _is_dtensor(hidden):
        hidden = _whole(hidden)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not _is_dtensor(weight):
        return Head(hidden, weight, bias, None)
    group = _ranks_of(weight)
    if bias is not None and _is_dtensor(bias):
        bias = bias.to_local()
    return Head(hidden, weight.to_local(), bias, group)


def refuse_split(head: Any) -> None:
    """Raise ModelError for a head that must be run, and is split."""
    if is_split(head):
        raise ModelError(
            f"packed_logprobs: the head is {type(head).__name__} with an adapter, a hook or a forward of its own, and "
            "its vocabulary is split over ranks. Fix: put none on the head, or don't split it"
        )


def layouts_of(hook: Any) -> bool:
    """Whether a hook is the one that `parallelize_module` lays a module's output out with."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor.")


def _ranks_of(weight: Any) -> ProcessGroup | None:
    from torch.distributed.tensor import Replicate, Shard

    placement = weight.placements[0] if len(weight.placements) == 1 else None
    if placement == Replicate():
        return None
    ranks, vocab = weight.device_mesh.size(), weight.shape[0]
    if placement != Shard(0):
        raise ModelError(
            f"packed_logprobs: the head's weight is laid out as {tuple(weight.placements)}. "
            "Fix: use ColwiseParallel(), which splits the vocabulary, or don't split the head"
        )
    if vocab % ranks:
        raise ModelError(
            f"packed_logprobs: {ranks} ranks don't divide the head's {vocab} ids. "
            f"Fix: call model.resize_token_embeddings(pad_to_multiple_of={ranks}), or don't split the head"
        )
    group: ProcessGroup = weight.device_mesh.get_group()
    return group


def refuse_rows(hidden: torch.Tensor, rows: int) -> None:
    """Raise ModelError for hidden states [..., H] of other than all `rows`."""
    if (found := hidden.shape[:-1].numel()) != rows:
        raise ModelError(
            f"packed_logprobs: the head gets {found} of the batch's {rows} rows. Fix: give it every row, after "
            "sequence-parallel layers by ColwiseParallel(input_layouts=Shard(1))"
        )


def _whole(x: Any) -> torch.Tensor:
    """Every row on each rank. The gradient that comes back is whole on each, and needs no sum."""
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate()] * len(x.placements)
    out: torch.Tensor = x.redistribute(placements=everywhere).to_local(grad_placements=everywhere)
    return out


def _is_dtensor(x: Any) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)
