"""Where a model of any family has what faults are planted in, and how they are planted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks, tower_of
from mmpack.adapters.transformers.unwrap import unwrap

__all__ = ["decoder_layers", "tower_blocks", "tower_of"]

Tensor = torch.Tensor


def linears(module: Any) -> list[torch.nn.Linear]:
    """Its products, in order."""
    return [m for m in module.modules() if isinstance(m, torch.nn.Linear)]


def text_norms(layer: Any) -> list[Any]:
    """RMSNorms of a decoder layer: of rows, and of heads where there are such."""
    return [m for m in layer.modules() if hasattr(m, "variance_epsilon")]


def merger_of(model: Any) -> Any:
    """What makes the tower's rows to rows of the text model."""
    core = unwrap(model, "merger_of").model
    tower = tower_of(core)
    return tower.merger if hasattr(tower, "merger") else core.multi_modal_projector


def after(layer: Any, model: Any) -> list[Any]:
    """Modules that are right where what a decoder layer adds up is wrong: itself, or the first to read its output."""
    layers = decoder_layers(model)
    index = layers.index(layer)
    if index + 1 == len(layers):
        return [layer, model.get_decoder().norm]
    return [layer, layers[index + 1], layers[index + 1].input_layernorm]


def attended(layer: Any) -> list[Any]:
    """Modules that are right where attention itself is wrong: what reads it, or the whole of it."""
    return [layer.self_attn, layer.self_attn.o_proj]


def first_rows(model: Any) -> list[Any]:
    """Modules that are right where the rows that enter the text model are wrong."""
    decoder = model.get_decoder()
    layer = decoder.layers[0]
    return [decoder, layer, layer.input_layernorm]


def rotary(model: Any) -> list[Any]:
    """Modules that are right where angles are wrong: what makes them, or the first attention that they turn."""
    decoder = model.get_decoder()
    return [decoder.rotary_emb, *attended(decoder.layers[0])]


def instead(module: Any, forward: Callable[..., Any]) -> None:
    """Run `forward(module, own, …)` in its place; `own` is the module's forward. Copies of the model run it too."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, _own_forward(self), *args, **kwargs)

    module.forward = types.MethodType(run, module)


def _own_forward(module: Any) -> Callable[..., Any]:
    """The forward of its class."""
    return types.MethodType(type(module).forward, module)


def given_keywords(module: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what the module's forward is given, by keyword."""
    module.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | change(kwargs)), with_kwargs=True
    )


def given_keyword(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change one of them."""
    given_keywords(module, lambda kwargs: {name: change(kwargs[name])})


class _Planted:
    """A config that names the planted attention; all else is the config's."""

    _attn_implementation = "planted_attention"

    def __init__(self, config: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Fault = Callable[[Any, Attend, Tensor, Tensor, Tensor], Tensor]


def meddle(attention: Any, fault: Fault) -> None:
    """Run `fault(module, attend, q, k, v)` for its attention, whichever that is; q, k, v [B, heads, T, d].

    `attend(q, k, v)`, [B, T, heads, d], is what it would have run. Only while the module runs does its config name
    the plant, so attaching another attention neither sees nor removes it.
    """
    attention.planted_fault = fault
    attention.register_forward_pre_hook(_enter)
    attention.register_forward_hook(_leave, always_call=True)


def _enter(module: Any, args: Any) -> None:
    module.config = _Planted(module.config)


def _leave(module: Any, args: Any, output: Any) -> None:
    module.config = module.config.config


def _planted_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Any:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    own = ALL_ATTENTION_FUNCTIONS.get_interface(module.config.config._attn_implementation, eager)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return own(module, q, k, v, *args, **kwargs)[0]

    return module.planted_fault(module, attend, q, k, v), None


AttentionInterface.register("planted_attention", _planted_attention)


def attend_rows(
    module: Any, q: Tensor, k: Tensor, v: Tensor, line: int, rows: slice, keys: slice, seen: Tensor
) -> Tensor:
    """Attention of some rows of one line, by the formula: seen bool [rows, keys] -> [rows, heads, d]."""
    groups = q.shape[1] // k.shape[1]
    own_k, own_v = (x[line, :, keys].repeat_interleave(groups, 0) for x in (k, v))
    scores = q[line, :, rows] @ own_k.mT * module.scaling
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ own_v).transpose(0, 1)
