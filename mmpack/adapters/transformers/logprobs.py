"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from mmpack.adapters.transformers.heads import Values, head_of, logit_cap, read_in_forward, reader
from mmpack.adapters.transformers.inputs import inputs_of
from mmpack.adapters.transformers.tower import Features
from mmpack.adapters.transformers.ulysses.make import row_split
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import check_flag
from mmpack.packing.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: Literal[False] = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor: ...


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    *,
    entropy: bool,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
    kept_ids: bool = True,
    sequence_group: ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """float32 [N]: log p (natural log) of each loss token under `model`, of a packed or a padded batch; differentiable.

    Pass the outermost wrapper, DistributedDataParallel or DeepSpeed's engine: `ddp.module` trains without reducing
    gradients, which warns. The model's whole forward runs, with its hooks and what was put in its place (accelerate's
    autocast); one that changes the logits which its head makes is refused. A head that `parallelize_module` or
    `tp_plan` split by vocabulary stays split. A head that an adapter changed (LoRA, DoRA), with a forward hook or a
    forward put in the place of its own, or whose logits are capped (Gemma 4), makes logits, of 1,024 loss tokens at a
    time. Under `torch.no_grad()`, for old and reference logprobs, no activations are held: memory is that
    of one layer, however many there are.

    Args:
        temperature: logits are divided by it.
        entropy: return also the entropy [N], in nats, of the distribution that each loss token comes from.
        vision, features, max_patches: see `model_inputs`.
        memory_budget: bytes for the head's probabilities, which the backward then need not compute again; see
            `linear_selected_logprobs`.
        kept_ids: the distribution is that of the batch's kept ids, where it has some: of old, new and reference
            logprobs and of the entropy. False: that of the whole vocabulary.
        sequence_group: ranks that share the rows of this batch, which each of them holds (Ulysses). Every rank gets all
            N values, takes the whole loss of them, and has the gradients of its own rows: their sum over the ranks is
            the gradient. See docs/sequence_parallel.md.

    Raises: as `model_inputs` does; ModelError for what is no transformers model; ArgumentError.
    """
    check_flag("packed_logprobs", "kept_ids", kept_ids)
    whole = unwrap(model, "packed_logprobs")
    head = head_of(whole)
    split = row_split(batch, model, sequence_group, "packed_logprobs")
    own = batch if split is None else split.own_loss(batch)
    inputs = inputs_of(batch, model, vision, features, max_patches, split)
    read = reader(head, own, temperature, entropy, memory_budget, kept_ids, logit_cap(whole))
    return _gathered(read_in_forward(model, whole, head, read, inputs), split)


def _gathered(values: Values, split: RowSplit | None) -> Values:
    """Those of all ranks' loss tokens, where rows are split."""
    if split is None:
        return values
    if torch.is_tensor(values):
        return split.gather(values)
    logprobs, entropies = split.gather(torch.stack(values, dim=1)).unbind(1)
    return logprobs.contiguous(), entropies.contiguous()
