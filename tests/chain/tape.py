"""What a forward and backward of a transformers Qwen-VL leave at each stage, by hooks; the model stays as it is."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmpack.adapters.transformers.modules import attention_configs, decoder_layers

Key = tuple[str, str]  # stage, place: a module's name
STAGES = (  # in order of execution
    "tower", "projector", "embedding", "merge", "rms_norm", "qkv", "rotary", "attention", "o",
    "mlp", "head", "logprob", "ratio", "kl", "loss",
)  # fmt: skip
TOWER = ("tower", "projector")
TOKENS = ("logprob", "ratio", "kl", "loss")  # one number per loss token, or of the step
LAST_NORM = ("rms_norm", "language_model.norm")

_WEIGHTS = {  # beginnings of names of the model's weights, the longest first
    "model.visual.merger": "projector",
    "model.visual.deepstack_merger_list": "projector",
    "model.visual": "tower",
    "model.language_model.embed_tokens": "embedding",
    "lm_head": "head",
}
_LAYER = r"language_model\.layers\.\d+\."
_MODULES = {  # names below the head
    r"visual\.blocks\.\d+": "tower",
    r"visual\.(merger|deepstack_merger_list\.\d+)": "projector",
    r"language_model\.embed_tokens": "embedding",
    _LAYER + r"(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)": "rms_norm",
    r"language_model\.norm": "rms_norm",
    _LAYER + r"self_attn\.[qkv]_proj": "qkv",
    _LAYER + r"self_attn\.o_proj": "o",
    _LAYER + r"mlp\.(gate|up|down)_proj": "mlp",
}


def stage_of(module: str) -> str | None:
    """Return the stage that a module's output belongs to, by its name below the head; None for all others."""
    return next((stage for form, stage in _MODULES.items() if re.fullmatch(form, module)), None)


def stage_of_weight(name: str) -> str | None:
    """Return the stage that a weight of the whole model belongs to."""
    for start, stage in _WEIGHTS.items():
        if name.startswith(start):
            return stage
    return stage_of(name.removeprefix("model.").rpartition(".")[0])


@dataclass
class Entry:
    """A value as the forward had it, and its gradient after the backward."""

    value: Tensor
    gradient: Tensor | None = None


class Tape:
    """`with Tape(model) as tape:` a forward and its backward; then `tape.entries`, in order of execution."""

    def __init__(self, model: Any):
        self.model = model
        self.entries: dict[Key, Entry] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        core = self.model.model
        for name, module in core.named_modules():
            stage = stage_of(name)
            if stage is not None:
                self._hook(module.register_forward_hook, self._output(stage, name))
            if stage == "o":
                self._hook(module.register_forward_pre_hook, self._attention(name), prepend=True)
        self._hook(core.get_decoder().register_forward_pre_hook, self._embeds, with_kwargs=True)
        self._watch_attention()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def note(self, key: Key, value: Tensor, by_token: bool = False) -> None:
        """Keep a value, and its gradient once there is one; `by_token`: of [B, heads, S, d]."""

        def shaped(x: Tensor) -> Tensor:
            return x.detach().transpose(1, 2) if by_token else x.detach()

        entry = self.entries[key] = Entry(shaped(value))
        if value.requires_grad:
            value.register_hook(lambda gradient: setattr(entry, "gradient", shaped(gradient)))

    def _hook(self, register: Any, hook: Any, **options: Any) -> None:
        self._stack.callback(register(hook, **options).remove)

    def _output(self, stage: str, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self.note((stage, name), output[0] if isinstance(output, tuple) else output)

        return hook

    def _attention(self, name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            self.note(("attention", name.rpartition(".")[0] + ".attention"), args[0])

        return hook

    def _embeds(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.note(("merge", "language_model"), kwargs["inputs_embeds"])

    def _watch_attention(self) -> None:
        """Queries and keys as attention gets them: there is no module that turns them."""
        places = {
            layer.self_attn: f"language_model.layers.{i}.rotary"
            for i, layer in enumerate(decoder_layers(self.model))
        }
        local = ALL_ATTENTION_FUNCTIONS._local_mapping
        for config in attention_configs(self.model.model.get_decoder()):
            name = config._attn_implementation
            own = ALL_ATTENTION_FUNCTIONS[name]

            def watched(
                module: Any, query: Tensor, key: Tensor, *args: Any, own: Any = own, **kwargs: Any
            ) -> Any:
                if module in places:
                    self.note(("rotary", places[module] + ".q"), query, by_token=True)
                    self.note(("rotary", places[module] + ".k"), key, by_token=True)
                return own(module, query, key, *args, **kwargs)

            if name in local:
                self._stack.callback(local.__setitem__, name, local[name])
            else:
                self._stack.callback(local.pop, name, None)
            local[name] = watched
