"""What the mixins of TRL's trainers have in common: TRL's methods they need, what they count, features they keep."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.transformers.attention import refuse_unpackable
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.adapters.transformers.unwrap import is_sharded, unwrap
from mmpack.cache.features import FeatureStore
from mmpack.errors import ArgumentError, BackendError, require
from mmpack.families import family_of_config
from mmpack.layout.occurrences import occurring_media
from mmpack.packing.batch import PackedBatch
from mmpack.schema.sample import Sample
from mmpack.versions import takes_encoded_media

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


@dataclass
class PassStats:
    """Sums over forward passes: rows of the text model, patches of the vision tower."""

    passes: int = 0
    samples: int = 0
    tokens: int = 0
    tokens_stock: int = 0
    patches: int = 0
    patches_stock: int = 0

    def add(self, other: PassStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        """A table of three lines."""
        lines = [f"{self.passes:>4} passes {'TRL':>12} {'mmpack':>12} {'ratio':>7}"]
        for name in ("tokens", "patches"):
            stock, own = getattr(self, f"{name}_stock"), getattr(self, name)
            lines.append(f"{name:<11} {stock:>12,} {own:>12,} {stock / max(own, 1):>6.2f}×")
        return "\n".join(lines)


class TrainerMixin(_Trainer):
    """Goes before a trainer of TRL's. Raises: ArgumentError for a class that names it after the trainer."""

    mmpack_stats: PassStats
    feature_bytes: int = 2**29
    feature_host_bytes: int = 0

    _trainer: str  # the trainer's name
    _tested = "1.12 to 1.16"  # versions of TRL
    # the trainer's methods that are overridden, and the parameters they are called with
    _methods: ClassVar[Mapping[str, Sequence[str]]]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_trainer"):
            return
        mixin = cls._mixin()
        before = cls.__mro__[: cls.__mro__.index(mixin)]
        if any(
            name in vars(c) for c in before if not issubclass(c, mixin) for name in cls._methods
        ):
            raise ArgumentError(
                f"{mixin.__name__}: {cls.__name__} names it after the trainer, whose methods would then win. "
                f"Fix: write class {cls.__name__}({mixin.__name__}, {cls._trainer})"
            )

    @classmethod
    def _mixin(cls) -> type:
        return next(c for c in cls.__mro__ if "_trainer" in vars(c))

    def _check_trl(self, module: str) -> None:
        """Raise MissingExtraError, BackendError for a TRL without the methods, ArgumentError for another trainer."""
        what = self._mixin().__name__
        version = require("trl", "trl", what).__version__
        trainer = getattr(require(module, "trl", what), self._trainer)
        if not isinstance(self, trainer):
            raise ArgumentError(
                f"{what}: it is not combined with {self._trainer}. "
                f"Fix: write class Trainer({what}, {self._trainer})"
            )
        for name, needed in self._methods.items():
            found = inspect.signature(getattr(trainer, name, _absent)).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in found.values())
            if not (takes_any or set(needed) <= found.keys()):
                raise BackendError(
                    f"{what}: {self._trainer}.{name} of TRL {version} does not take {', '.join(needed)}. "
                    f"Fix: install a TRL from {self._tested}"
                )

    def _start_packing(self, options: Sequence[tuple[str, Any, str]] = ()) -> None:
        """Look at the model and settings once the trainer is built. Raises: ModelError; LayoutError (MM006)."""
        what = self._mixin().__name__
        sharded = getattr(self.accelerator.state, "fsdp_plugin", None)
        other = f"turn it off, or train with plain {self._trainer}"
        own = (
            ("FSDP 1", getattr(sharded, "fsdp_version", 2) == 1, "fsdp_config={'version': 2}"),
            ("the router's auxiliary loss", self.aux_loss_enabled, other),
            ("torch_compile", self.args.torch_compile, other),
            # its noise shrinks with the length of what is embedded: here, of a pack
            ("neftune_noise_alpha", self.args.neftune_noise_alpha, other),
        )
        refuse_on(what, [*own, *options])
        self.mmpack_stats = PassStats()
        self._mmpack_stores: WeakKeyDictionary[torch.nn.Module, FeatureStore] = WeakKeyDictionary()
        policy = unwrap(self.accelerator.unwrap_model(self.model), what)
        self._mmpack_family = family_of_config(policy.config)
        refuse_unpackable(policy)

    @property
    def _vision(self) -> str:
        """A rank without a picture still runs the tower."""
        return "always" if self.accelerator.num_processes > 1 else "auto"

    def _count(self, batch: PackedBatch, samples: Sequence[Sample], width: int) -> None:
        """Add a pass to what is counted and logged. `width`: tokens of each row in TRL's rectangle."""
        stats = PassStats(
            passes=1,
            samples=len(samples),
            tokens=batch.num_tokens,
            tokens_stock=len(samples) * width,
            patches=batch.stats["patches_encoded"],
            patches_stock=sum(_patches(s) for s in samples),
        )
        self.mmpack_stats.add(stats)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in ("tokens", "tokens_stock", "patches", "patches_stock"):
            metrics[f"mmpack/{name}"].append(getattr(stats, name))

    def _features_of(self, model: Any, batch: PackedBatch) -> FeatureStore | None:
        """Where features of this model's media are kept: one store for all models whose towers are equal now.

        None where they are not kept: without media or a budget, and where the tower is trained, sharded or has dropout.
        """
        whole = unwrap(model, self._mixin().__name__)
        if not batch.media or not takes_encoded_media(whole):
            return None
        tower = tower_and_projector(whole)
        trained = any(p.requires_grad for p in tower.parameters())
        if self.feature_bytes + self.feature_host_bytes == 0 or trained or tower.random:
            return None
        # ranks must call a sharded tower equally often
        if any(is_sharded(module) for module in tower.modules):
            return None
        store = self._mmpack_stores.get(tower.modules[0])
        # new, or changed: merged adapters, a synced reference
        if store is None or not store.fits(tower):
            fitting = (s for s in self._mmpack_stores.values() if s.fits(tower))
            store = next(fitting, None) or FeatureStore(self.feature_bytes, self.feature_host_bytes)
            self._mmpack_stores[tower.modules[0]] = store
        return store


def _absent() -> None:
    """Stand in for a method that TRL lacks."""


def _patches(sample: Sample) -> int:
    """What the tower of a rectangle encodes of a sample: each medium as often as it occurs."""
    return sum(int(np.prod(m.grid_thw)) for m in occurring_media(sample))
