"""The chain's oracle: a copy of the model in a wider dtype, each sample by itself, transformers' own attention."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.packing.batch import Batch


class Wide(TorchFunctionMode):
    """Casts to float32 become casts to float64: norms and rotary angles are float32 whatever the model's dtype is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **given)


def exact_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model in `dtype`, float32 or float64, whose forward casts its inputs."""
    wide = copy.deepcopy(model).to(dtype)
    wide.model.register_forward_pre_hook(_cast, with_kwargs=True)
    return wide


def exact_logprobs(wide: Any, batch: Batch) -> Tensor:
    """[N] of a padded batch: the model's own forward, all logits of the loss rows, torch's log_softmax.

    Where the batch has kept ids, it is over these.
    """
    double = next(wide.parameters()).dtype == torch.float64
    with Wide() if double else contextlib.nullcontext():
        logits = _logits(wide, batch)
    return _chosen(logits, batch)


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """The same in the model's own dtype, as trainers have them: log_softmax of float32."""
    return _chosen(_logits(model, batch).float(), batch)


def _logits(model: Any, batch: Batch) -> Tensor:
    hidden = model.model(**model_inputs(batch, model)).last_hidden_state
    logits: Tensor = model.lm_head(hidden.flatten(0, 1)[batch.loss_rows.long()])
    return logits


def _chosen(logits: Tensor, batch: Batch) -> Tensor:
    targets = batch.loss_targets[:, None]
    if (kept := batch.kept_ids) is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[torch.repeat_interleave(kept.offsets.diff()), kept.ids] = False
        logits = logits.masked_fill(others, -torch.inf)
    logprobs: Tensor = logits.log_softmax(-1).gather(1, targets)[:, 0]
    return logprobs


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _cast(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = next(module.parameters()).dtype
    wide = {
        name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in kwargs.items()
    }
    return args, wide
