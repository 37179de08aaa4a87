"""Log-probabilities of a batch's loss tokens: forward to the hidden states, logits never made."""

from __future__ import annotations

from typing import Any

import torch

from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.ops.linear_selected_logprobs import linear_selected_logprobs
from mmpack.pack.batch import Batch


def packed_logprobs(
    model: Any, batch: Batch, temperature: float = 1.0, vision: str = "auto"
) -> torch.Tensor:
    """float32 [N]: log p of each loss token under `model`, of a packed or a padded batch; differentiable.

    Args: `temperature`: logits are divided by it. `vision`: see `model_inputs`.
    """
    hidden = model.model(**model_inputs(batch, model, vision)).last_hidden_state
    logprobs = linear_selected_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        model.lm_head.weight,
        batch.loss_targets,
        rows=batch.loss_rows,
        bias=model.lm_head.bias,
        temperature=temperature,
        rows_unique=batch.loss_rows_unique,
        row_inverse=batch.loss_row_inverse,
    )
    assert isinstance(logprobs, torch.Tensor)  # no entropy was asked for
    return logprobs
