"""What a forward and backward of a transformers Qwen-VL leave at each stage, by hooks; the model stays as it is.

Values are those of the model's forward, in its shapes, detached; gradients are those that autograd brings to them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from chain.record import Key
from chain.stages import stage_of
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmpack.adapters.transformers.modules import attention_configs, decoder_layers

HARMLESS = "mmpack.tests"  # kept features ask where a tower's hooks are from; these only look


@dataclass
class Entry:
    """A value as the forward had it, and its gradient after the backward."""

    value: Tensor
    gradient: Tensor | None = None


class Tape:
    """`with Tape(model) as tape:` a forward and its backward; then `tape.entries`, in order of execution.

    Args: `model`: a whole one, attached or not, before the block.
    """

    def __init__(self, model: Any):
        self.model = model
        self.entries: dict[Key, Entry] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        core = self.model.model
        with ExitStack() as stack:
            for name, module in core.named_modules():
                stage = stage_of(name)
                if stage is not None:
                    self._hook(stack, module.register_forward_hook(self._output(stage, name)))
                if stage == "o":
                    hook = self._input(name.rpartition(".")[0] + ".attention")
                    self._hook(stack, module.register_forward_pre_hook(hook, prepend=True))
            hook = core.get_decoder().register_forward_pre_hook(self._embeds, with_kwargs=True)
            self._hook(stack, hook)
            self._watch_attention(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def note(
        self,
        stage: str,
        place: str,
        value: Tensor,
        shape: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """Keep a value, and its gradient once there is one, both after `shape`."""
        entry = Entry(shape(value.detach()))
        self.entries[stage, place] = entry
        if value.requires_grad:

            def keep(gradient: Tensor) -> None:
                entry.gradient = shape(gradient.detach())

            value.register_hook(keep)

    @staticmethod
    def _hook(stack: ExitStack, hook: Any) -> None:
        stack.callback(hook.remove)

    def _output(self, stage: str, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self.note(stage, name, output[0] if isinstance(output, tuple) else output)

        hook.__module__ = HARMLESS
        return hook

    def _input(self, place: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            self.note("attention", place, args[0])

        hook.__module__ = HARMLESS
        return hook

    def _embeds(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("inputs_embeds") is not None:
            self.note("merge", "language_model", kwargs["inputs_embeds"])

    def _watch_attention(self, stack: ExitStack) -> None:
        """Queries and keys [B, heads, S, d] as attention gets them: there is no module that turns them."""
        places = {
            layer.self_attn: f"language_model.layers.{i}.rotary"
            for i, layer in enumerate(decoder_layers(self.model))
            if hasattr(layer, "self_attn")  # others have linear attention, without positions
        }
        local = ALL_ATTENTION_FUNCTIONS._local_mapping
        for config in attention_configs(self.model.model.get_decoder()):
            name = config._attn_implementation
            own = ALL_ATTENTION_FUNCTIONS[name]

            def watched(
                module: Any, query: Tensor, key: Tensor, *args: Any, own: Any = own, **kwargs: Any
            ) -> Any:
                place = places.get(module)
                if place is not None:
                    self.note("rotary", f"{place}.q", query, _by_token)
                    if key.shape[2] == query.shape[2]:  # else there are cached ones before it
                        self.note("rotary", f"{place}.k", key, _by_token)
                return own(module, query, key, *args, **kwargs)

            if name in local:
                stack.callback(local.__setitem__, name, local[name])
            else:
                stack.callback(local.pop, name, None)
            local[name] = watched


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def rows_of(x: Tensor, rows: int) -> Tensor:
    """[rows, D] of a value of one row each, however its dimensions are cut."""
    return x.reshape(rows, -1)
