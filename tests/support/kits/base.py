"""What a family's kit declares: a tiny transformers model as data, a processor without a hub, how samples are drawn.

Imports torch and transformers only when a model or a processor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmpack.demo.probe_samples import Grid, written_with_markers
from mmpack.errors import require
from mmpack.families import Family, get_family
from mmpack.versions import has_family, refuse_old_transformers

if TYPE_CHECKING:
    import torch

# ids that stand for one medium in a sample, its placeholders among them
Written = Callable[[Family, str, Grid], list[int]]


@dataclass(frozen=True)
class Kit:
    """A family without a hub. What is not given is as the Qwen-VLs have it.

    `config`: keyword arguments of the config class (parts as dicts); `narrow`: part of the config → what makes it half
    as wide, for tests of many passes. `lacks`: name of a conformance check → why the family does not have it.
    """

    family: str
    model_class: str | type  # transformers' names, or classes of one's own
    config_class: str | type
    config: Mapping[str, Any]
    narrow: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # called with tokenizer=None; pictures stay small
    processor: Callable[..., Any] | None = None
    # its processor can't be made without torchvision
    needs_torchvision: bool = False
    # grids of drawn media: two pictures of unlike sizes, a clip (None: the family has no video)
    image: Grid = (1, 4, 6)
    other: Grid = (1, 8, 4)
    video: Grid | None = (2, 4, 4)
    # an audio's (feature frames, 1, 1); None: the family hears nothing
    audio: Grid | None = None
    written: Written = written_with_markers
    # drawn text ids are below it
    text_ids: int = 100_000
    # weights are made larger by it, so that attention is far from uniform and a wrong row shows
    spread: float = 4.0
    heavy: bool = False  # its packs take long in float64: checked in the slow suite
    lacks: Mapping[str, str] = field(default_factory=dict)
    # PEFT's "all-linear" takes other layers too: name each linear layer in full
    lora_by_name: bool = False
    # attributes that its processor must get before stock TRL can use it
    for_trl: Mapping[str, Any] = field(default_factory=dict)
    # called with a model just made: weights that transformers' initialisation makes zero, or attention too sharp
    adjust: Callable[[Any], None] | None = None

    @property
    def about(self) -> Family:
        return get_family(self.family)

    @property
    def available(self) -> bool:
        """Whether the installed transformers has this model, in a form that mmpack knows."""
        return has_family(self.about)

    def classes(self) -> tuple[Any, Any]:
        """The model's and the config's."""
        transformers = require("transformers", "hf", f"the kit of {self.family}")
        given = (self.model_class, self.config_class)
        made = [getattr(transformers, c) if isinstance(c, str) else c for c in given]
        return made[0], made[1]

    def model_config(self, narrow: bool = False) -> Any:
        """transformers' config. Raises: ModelError where transformers lacks the model."""
        refuse_old_transformers(self.about, "tiny_model")
        config = self.classes()[1](**self.config)
        for part, values in self.narrow.items() if narrow else ():
            getattr(config, part).update(dict(values))
        return config

    def tiny(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """The tiny model in eval mode on the CPU, weights by seed; float32 if no dtype is given."""
        return self._model(self.model_config(), seed, dtype)

    def small(self, seed: int = 0, spread: float | None = None) -> Any:
        """`tiny`, narrowed and spread out, in float32: the same layers, vocabulary and tower."""
        model = self._model(self.model_config(narrow=True), seed, None)
        return spread_out(model, self.spread if spread is None else spread)

    def lora_targets(self, model: Any) -> str | list[str]:
        """`target_modules` of PEFT's LoraConfig: every linear layer but the head."""
        if not self.lora_by_name:
            return "all-linear"
        torch = require("torch", "torch", f"the kit of {self.family}")
        head = model.get_output_embeddings()
        return [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]

    def _model(self, config: Any, seed: int, dtype: torch.dtype | None) -> Any:
        torch = require("torch", "torch", f"the kit of {self.family}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.classes()[0](config)
            if self.adjust is not None:
                with torch.no_grad():
                    self.adjust(model)
        return model.to(torch.float32 if dtype is None else dtype).eval()


def spread_out(model: Any, factor: float = 4) -> Any:
    """Larger weights of layers, by `factor`, in place."""
    torch = require("torch", "torch", "spread_out")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in name:
                parameter.mul_(factor)
    return model
