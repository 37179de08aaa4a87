"""The oracle of values and gradients in float64: each sample by itself, the model's own attention, all logits.

Values are logprobs [N] of the loss tokens; gradients are of their weighted sum, by parameter.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mmpack.adapters.transformers import model_inputs, packed_logprobs
from mmpack.packing.pad import pad
from mmpack.schema.sample import Sample

Gradients = dict[str, torch.Tensor]
# Of transformers' modeling files; since 5.17 each calls a package's kernel, where one is installed, on any device.
LINEAR_ATTENTION = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("causal_conv1d_fn", "causal_conv1d_update"),
)


class Wide(TorchFunctionMode):
    """Norms, rotary angles and losses cast to float32 whatever the model's dtype is; here they cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {k: _wider(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wider, args), **given)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def torch_functions(model: Any) -> Iterator[None]:
    """Let linear attention run by transformers' torch functions in a model's own forward and backward.

    flash-linear-attention and causal-conv1d take no tensor on a CPU, and round float32 to TF32 on a GPU.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds}]
    before = [
        (held, name, held[name])
        for held in files
        for name in LINEAR_ATTENTION
        if hasattr(held.get(name), "__wrapped__")
    ]
    for held, name, function in before:
        held[name] = function.__wrapped__
    try:
        yield
    finally:
        for held, name, function in before:
            held[name] = function


def wide_copy(model: Any) -> Any:
    """The model in float64, weights as they are; inputs of its forward are cast. Run it `with Wide():`."""
    wide = copy.deepcopy(model).double()
    text = wide.config.get_text_config()
    if any(hasattr(text, name) for name in ("num_experts", "num_local_experts")):
        text._experts_implementation = "eager"  # grouped products take no float64
    wide.register_forward_pre_hook(_cast, with_kwargs=True)
    return wide


def _cast(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = {
        n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for n, x in kwargs.items()
    }
    return args, wide


def exact(model: Any, samples: Sequence[Sample]) -> tuple[torch.Tensor, Gradients]:
    """What `logprobs_and_gradients` measures, in float64: values [N], and gradients summed over the samples."""
    wide, values = wide_copy(model), []
    for sample in samples:
        batch = pad([sample])
        with torch_functions(wide), Wide():
            logits = wide(**model_inputs(batch, wide)).logits
        assert logits.dtype == torch.float64
        rows = logits.flatten(0, 1)[batch.loss_rows.long()].log_softmax(-1)
        logprobs = rows.gather(1, batch.loss_targets[:, None])[:, 0]
        (logprobs * weights_of(batch).double()).sum().backward()
        values.append(logprobs.detach())
    gradients = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}
    return torch.cat(values), gradients


def separate(model: Any, samples: Sequence[Sample]) -> tuple[torch.Tensor, Gradients]:
    """The same in the model's own dtype: each sample padded by itself, by the model's own attention."""
    values: list[torch.Tensor] = []
    gradients: Gradients = {}
    for sample in samples:
        with torch_functions(model):
            value, gradient = logprobs_and_gradients(model, pad([sample]))
        values.append(value)
        for name, g in gradient.items():
            gradients[name] = gradients[name] + g if name in gradients else g
    return torch.cat(values), gradients


def weights_of(batch: Any) -> torch.Tensor:
    """float32 [N]: a weight for each loss token, that follows from its id and its index in the sample."""
    return (1 + (batch.loss_targets % 7 + batch.loss_token_index % 5).float()) / 10


def logprobs_and_gradients(model: Any, batch: Any, **kwargs: Any) -> tuple[torch.Tensor, Gradients]:
    """float32 [N], and the gradient of their weighted sum, by parameter."""
    model.zero_grad(set_to_none=True)
    logprobs: Any = packed_logprobs(model, batch, **kwargs)
    (logprobs * weights_of(batch)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return logprobs.detach(), gradients


def relative_difference(a: Gradients, b: Gradients) -> float:
    """Frobenius norm of the difference of two sets of gradients, over that of the second."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    off = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    return math.sqrt(off / sum(float(g.double().square().sum()) for g in b.values()))
