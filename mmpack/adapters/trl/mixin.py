"""What the mixins of TRL's trainers have in common: the version of TRL, and their place before the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmpack.errors import ArgumentError, BackendError, require

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object
SUPPORTED = "1.16"  # the methods overridden are private, so other versions may differ


class TrainerMixin(_Trainer):
    """Goes before a trainer of TRL's. Raises: ArgumentError for a class that names it after the trainer."""

    _trainer: str  # the trainer's name
    _method: str  # one of the trainer's that the mixin overrides

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        mixin = next(c for c in cls.__mro__ if TrainerMixin in c.__bases__)
        before = cls.__mro__[: cls.__mro__.index(mixin)]
        if any(cls._method in vars(c) and not issubclass(c, mixin) for c in before):
            raise ArgumentError(
                f"{mixin.__name__}: {cls.__name__} names it after the trainer, whose methods would then win. "
                f"Fix: write class {cls.__name__}({mixin.__name__}, {cls._trainer})"
            )

    def _check_trl(self, module: str) -> None:
        """Raise MissingExtraError or BackendError for another TRL, ArgumentError for no trainer of `module`'s."""
        what = next(c for c in type(self).__mro__ if TrainerMixin in c.__bases__).__name__
        version = require("trl", "trl", what).__version__
        if not version.startswith(SUPPORTED + "."):
            raise BackendError(
                f"{what}: TRL {version} is installed, it supports {SUPPORTED}. "
                f"Fix: pip install 'trl=={SUPPORTED}.*'"
            )
        if not isinstance(self, getattr(require(module, "trl", what), self._trainer)):
            raise ArgumentError(
                f"{what}: it is not combined with {self._trainer}. "
                f"Fix: write class Trainer({what}, {self._trainer})"
            )
