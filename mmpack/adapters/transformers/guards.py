"""What an attached model's forward is handed so that no other model, and no other attention, can take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmpack.errors import ModelError


class Ids:
    """In the place of input_ids [B, S], for the forward of one model, which makes what depends on its weights there.

    Reads as the tensor does. No embedding takes it, so a model that was detached, or another one, raises. No subclass
    of Tensor, which torch.compile would look into.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        core: torch.nn.Module,
        attached: bool,
        make: Callable[[], dict[str, Any]],
    ):
        self.ids = ids
        self.core = core  # the model below the head
        self.attached = attached  # whether its attention must be mmpack's
        self.make = make  # more keywords

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "embedding":
            raise ModelError(
                "model_inputs: the model was detached before its forward, or is not the one that they were made for. "
                "Fix: detach after the forward; make inputs for each model"
            )
        return func(*(a.ids if isinstance(a, Ids) else a for a in args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there are ids
            raise AttributeError(name)
        return getattr(self.ids, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, *args: Any, **kwargs: Any) -> Ids:
        return Ids(self.ids.to(*args, **kwargs), self.core, self.attached, self.make)

    def clone(self) -> Ids:
        return Ids(self.ids.clone(), self.core, self.attached, self.make)

    def open(self, core: torch.nn.Module, attached: bool) -> dict[str, Any]:
        """Keywords of the forward below the head. Raises ModelError for another model, or one that was detached."""
        if core is not self.core:
            raise ModelError(
                "model_inputs: these inputs were made for another model, and so is what its tower gives. "
                "Fix: model_inputs(batch, model) for each model"
            )
        if self.attached and not attached:
            raise ModelError(
                "model_inputs: the model was detached before its forward. Fix: detach after the forward"
            )
        return {"input_ids": self.ids} | self.make()


class OtherAttention(ModelError, AttributeError):
    """Also an AttributeError, so that `hasattr` of a `Rule` is false."""


class Rule:
    """Stands for the mask where `visible_until` is the whole rule: any attention but mmpack's fails on it.

    That is how gradient checkpointing of a kind that mmpack doesn't know, after detach, comes to an error.
    """

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls.error()

    def __getattr__(self, name: str) -> Any:
        raise self.error()

    def __getitem__(self, index: Any) -> Any:
        raise self.error()

    @staticmethod
    def error() -> OtherAttention:
        return OtherAttention(
            "mmpack attention: another attention got its rows; after detach, gradient checkpointing runs the forward "
            "again in backward. Fix: detach after backward, or switch transformers' checkpointing on before attach"
        )


RULE = Rule()
