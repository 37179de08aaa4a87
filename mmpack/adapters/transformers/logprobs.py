"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.ops.linear_selected_logprobs import linear_selected_logprobs
from mmpack.pack.batch import Batch


@overload
def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def packed_logprobs(
    model: Any, batch: Batch, temperature: float = 1.0, vision: str = "auto", *, entropy: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def packed_logprobs(
    model: Any,
    batch: Batch,
    temperature: float = 1.0,
    vision: str = "auto",
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """float32 [N]: log p of each loss token under `model`, of a packed or a padded batch; differentiable.

    Args: `temperature`: logits are divided by it. `vision`: see `model_inputs`. `entropy`: return also the entropy
    in nats [N] of the distribution that each loss token is of.
    """
    whole = unwrap(model, "packed_logprobs")
    head = whole.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ModelError(
            f"packed_logprobs: the head is a {type(head).__name__}, and only a plain Linear can be read "
            "by its weight. Fix: merge the adapter, or make logits and use mp.selected_logprobs"
        )
    hidden = whole.model(**model_inputs(batch, whole, vision)).last_hidden_state
    return linear_selected_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        batch.loss_targets,
        rows=batch.loss_rows,
        bias=head.bias,
        temperature=temperature,
        entropy=entropy,
        rows_unique=batch.loss_rows_unique,
        row_inverse=batch.loss_row_inverse,
    )
