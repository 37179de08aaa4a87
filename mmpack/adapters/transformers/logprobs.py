"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from mmpack.adapters.transformers.heads import (
    Asked,
    head_of,
    listed_of,
    logit_cap,
    read_in_forward,
    reader,
)
from mmpack.adapters.transformers.inputs import inputs_of, model_inputs
from mmpack.adapters.transformers.tower import Features
from mmpack.adapters.transformers.ulysses.make import row_split
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import check_flag
from mmpack.ops.logprobs.listed import ListedLogprobs
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
) -> Tensor: ...


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
) -> Tensor | tuple[Tensor, Tensor]: ...


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
) -> Tensor | tuple[Tensor, Tensor]:
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
    split = row_split(batch, model, sequence_group, "packed_logprobs")
    own = batch if split is None else split.own_loss(batch)
    inputs = inputs_of(batch, model, vision, features, max_patches, split)
    asked = Asked(temperature, entropy, memory_budget, kept_ids)
    values = _read(model, whole, own, inputs, asked)
    values = values.unflatten(0, (1 + bool(entropy), len(own.loss_targets)))
    if split is not None:  # those of all ranks' loss tokens
        values = split.gather(values.T.contiguous()).T.contiguous()
    return (values[0], values[1]) if entropy else values[0]


def _read(model: Any, whole: Any, batch: Batch, inputs: dict[str, Any], asked: Asked) -> Tensor:
    head = head_of(whole)
    read = reader(head, batch, asked, logit_cap(whole))
    return read_in_forward(model, whole, head, read, inputs)


def packed_listed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, ListedLogprobs]:
    """Logprobs [N] of the loss tokens for `policy_loss`, and those of all ids that `batch.teachers` scored.

    The first are over the batch's kept ids, if it has some; else they are the second's `targets`. The second are over
    the whole vocabulary: `lists` for `distillation_loss`, `targets` for `teacher_advantages`, and the entropy with
    `entropy=True`. One forward of the model and one pass over V make all of them; differentiable.

    Args: see `packed_logprobs`, and so are errors, parallel models, and heads that an adapter changed.
    """
    inputs = model_inputs(batch, model, vision, features=features, max_patches=max_patches)
    asked = Asked(temperature, entropy, memory_budget, teachers=True)
    values = _read(model, unwrap(model, "packed_listed_logprobs"), batch, inputs, asked)
    return listed_of(values, batch, entropy)
