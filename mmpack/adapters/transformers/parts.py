"""mmpack's attention on a part of a model, the text model or the vision tower: set for as long as it is attached.

What the part had before is kept on its module and put back. Which function it is, and which hooks go with it, its own
file says: `attention` (text) and `tower_attention`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mmpack.adapters.transformers.modules import attention_configs
from mmpack.errors import ModelError

# ---- what backward runs again -----------------------------------------------------------------------

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
    """Replace a layer's checkpoint function by `make(function)`; return the original. An attached one stays wrapped."""
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


KEPT = "_mmpack_kept"  # on the module of an attached part


class Kept:
    """What detach puts back. A pickled model has it too; a deep copy is another model and comes out detached."""

    def __init__(self, configs: list[Any], hooks: list[Any]):
        self.configs, self.hooks = configs, hooks
        self.own = [config._attn_implementation for config in configs]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        put([copy.deepcopy(config, memo) for config in self.configs], self.own)


@dataclass(frozen=True)
class Part:
    """A part of models. `core` is a model below its head."""

    what: str  # in errors
    name: str  # of the attention function
    module_of: Callable[[Any], torch.nn.Module]  # of a core
    register: Callable[[], None]  # the function, with transformers
    hook: Callable[[Any], list[Any]]  # a core, while the part is attached

    def is_attached(self, module: torch.nn.Module) -> bool:
        kept = vars(module).get(KEPT)
        return kept is not None and all(c._attn_implementation == self.name for c in kept.configs)

    def refuse_unattachable(self, core: Any) -> None:
        """Raise ModelError where `attach` can't set the attention, or would set another model's."""
        module = self.module_of(core)
        if vars(module).get(KEPT) is not None:
            if not self.is_attached(module):
                raise self._set_since()
        elif any(config._attn_implementation == self.name for config in attention_configs(module)):
            raise ModelError(
                "attach: the model shares its config with another model that is attached. "
                "Fix: detach that one, or give each its own config (copy.deepcopy)"
            )

    def attach(self, core: Any) -> bool:
        """Attach, and return whether it was detached before. Raises as `refuse_unattachable` does."""
        self.refuse_unattachable(core)
        module = self.module_of(core)
        if self.is_attached(module):
            return False
        self.register()
        configs = attention_configs(module)
        setattr(module, KEPT, Kept(configs, self.hook(core)))
        put(configs, [self.name] * len(configs))
        wrap_checkpoints(module, configs, self.name)
        return True

    def detach(self, core: Any) -> None:
        """Put back what was there; nothing where it is not attached."""
        module = self.module_of(core)
        kept = vars(module).pop(KEPT, None)
        if kept is None:
            return
        unwrap_checkpoints(module)
        for hook in kept.hooks:
            hook.remove()
        changed = False
        for config, own in zip(kept.configs, kept.own, strict=True):
            if config._attn_implementation == self.name:
                put([config], [own])
            else:
                changed = True
        if changed:
            raise self._set_since()

    def _set_since(self) -> ModelError:
        return ModelError(
            f"mmpack attention: the {self.what}'s attention was changed while it was attached, and is left as it is. "
            "Fix: detach first, then call model.set_attn_implementation(…)"
        )
