"""Gradient checkpointing: what backward runs again finds mmpack's attention, also in a model detached since.

The function that checkpoints a layer (transformers', or that of torch's `checkpoint_wrapper`) is wrapped while the
model is attached: the layer that it runs again has the attention of its forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def wrap_checkpoints(part: torch.nn.Module, configs: list[Any], name: str) -> None:
    """Let the part's checkpoints remember that its attention is mmpack's, the function of this name."""
    for module in part.modules():
        for attribute in FUNCTIONS:
            own = vars(module).get(attribute)
            if own is not None and not _is_wrapped(own):  # that of a deep copy is wrapped already
                setattr(module, attribute, functools.partial(_checkpoint, own, configs, name))


def unwrap_checkpoints(part: torch.nn.Module) -> None:
    """Undo `wrap_checkpoints`."""
    for module in part.modules():
        for attribute in FUNCTIONS:
            now = vars(module).get(attribute)
            if now is not None and _is_wrapped(now):
                setattr(module, attribute, now.args[0])


def exchange_checkpoint(module: Any, make: Callable[[Any], Any]) -> Any:
    """Give a layer the function that `make` makes of its own; returns its own. An attached one stays wrapped."""
    now = module._gradient_checkpointing_func
    own = now.args[0] if _is_wrapped(now) else now
    made = make(own)
    if _is_wrapped(now):
        made = functools.partial(_checkpoint, made, *now.args[1:])
    module._gradient_checkpointing_func = made
    return own


def _is_wrapped(function: Any) -> bool:
    return isinstance(function, functools.partial) and function.func is _checkpoint


def _checkpoint(
    own: Callable[..., Any],
    configs: list[Any],
    name: str,
    layer: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`own`, of the layer with mmpack's attention if that is on now. Compiled layers are not traced a second time."""
    if configs[0]._attn_implementation == name and not torch.compiler.is_compiling():
        layer = functools.partial(_attached, configs, name, layer)
    return own(layer, *args, **kwargs)


def _attached(
    configs: list[Any], name: str, layer: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with switched(configs, name):
        return layer(*args, **kwargs)


@contextlib.contextmanager
def switched(configs: list[Any], name: str | list[str]) -> Iterator[None]:
    """The attention of this name (or of a name for each config) within the block, then what was there before."""
    names = [name] * len(configs) if isinstance(name, str) else name
    before = [config._attn_implementation for config in configs]
    put(configs, names)
    try:
        yield
    finally:
        put(configs, before)


def put(configs: list[Any], names: list[str]) -> None:
    """Set the attention of each config by name.

    Not by the property, which sets configs below too, nor by `set_attn_implementation`, which checks and loads.
    """
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name
