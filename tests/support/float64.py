"""The oracle of values and gradients in float64: each sample by itself, the model's own attention, all logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.models import Gradients, logprobs_and_gradients, relative_difference, weights_of
from torch.overrides import TorchFunctionMode

import mmpack as mp
from mmpack.adapters.transformers import model_inputs
from mmpack.contracts import parameter_gradient_fp32_bound
from mmpack.schema.sample import Sample


class Wide(TorchFunctionMode):
    """Norms, rotary angles and losses cast to float32 whatever the model's dtype is; here they cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {k: _wider(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wider, args), **given)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def wide_copy(model: Any) -> Any:
    """The model in float64, weights as they are; inputs of its forward are cast. Run it `with Wide():`."""
    wide = copy.deepcopy(model).double()
    text = wide.config.get_text_config()
    if hasattr(text, "num_experts") or hasattr(text, "num_local_experts"):
        text._experts_implementation = "eager"  # grouped products take no float64
    wide.register_forward_pre_hook(_cast, with_kwargs=True)
    return wide


def _cast(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = {
        n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for n, x in kwargs.items()
    }
    return args, wide


def exact(model: Any, samples: list[Sample]) -> tuple[torch.Tensor, Gradients]:
    """What `logprobs_and_gradients` measures, in float64: values [N], and gradients summed over the samples."""
    wide, values = wide_copy(model), []
    for sample in samples:
        batch = mp.pad([sample])
        with Wide():
            logits = wide(**model_inputs(batch, wide)).logits
        assert logits.dtype == torch.float64
        rows = logits.flatten(0, 1)[batch.loss_rows.long()].log_softmax(-1)
        logprobs = rows.gather(1, batch.loss_targets[:, None])[:, 0]
        (logprobs * weights_of(batch).double()).sum().backward()
        values.append(logprobs.detach())
    gradients = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}
    return torch.cat(values), gradients


def separate(model: Any, samples: list[Sample]) -> tuple[torch.Tensor, Gradients]:
    """The same in the model's own dtype: each sample padded by itself, by the model's own attention."""
    values, gradients = [], {}
    for sample in samples:
        value, gradient = logprobs_and_gradients(model, mp.pad([sample]))
        values.append(value)
        for name, g in gradient.items():
            gradients[name] = gradients[name] + g if name in gradients else g
    return torch.cat(values), gradients


def assert_as_exact_as_separate(
    found: Gradients, apart: Gradients, wanted: Gradients, where: object = ""
) -> None:
    """The contract of parameter gradients in fp32, whose oracle is float64: two fp32 paths are not each other's."""
    off, bound = (relative_difference(g, wanted) for g in (found, apart))
    assert off <= parameter_gradient_fp32_bound(bound), (where, off, bound)
