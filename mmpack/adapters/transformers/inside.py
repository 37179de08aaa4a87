"""What an attached model's forward is handed so that no other model, and no other attention, can take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmpack.errors import ModelError


class Ids(torch.Tensor):
    """input_ids for the forward of one model, which makes what depends on its weights there (`make`).

    An embedding that is handed them raises: the model was detached, or is another one.
    """

    core: torch.nn.Module  # the model below the head
    attached: bool  # whether its attention must be mmpack's
    make: Callable[[], dict[str, Any]]  # more keywords

    @staticmethod
    def of(
        ids: torch.Tensor,
        core: torch.nn.Module,
        attached: bool,
        make: Callable[[], dict[str, Any]],
    ) -> Ids:
        out = ids.as_subclass(Ids)
        out.core, out.attached, out.make = core, attached, make
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "embedding":
            raise ModelError(
                "model_inputs: the model was detached before its forward, or is not the one that they were made for. "
                "Fix: detach after the forward; make inputs for each model"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        own = next((a for a in args if isinstance(a, Ids)), None)
        same = type(out) is torch.Tensor and own is not None and out.dtype == own.dtype
        if same and out.numel() == own.numel():  # moved, copied, reshaped
            return Ids.of(out, own.core, own.attached, own.make)
        return out

    def open(self, core: torch.nn.Module, attached: bool) -> dict[str, Any]:
        """Keywords of the forward below the head. Raises ModelError for another model, or one that was detached."""
        if core is not self.core:
            raise ModelError(
                "model_inputs: these inputs were made for another model, and so is what its tower gives. "
                "Fix: batch.model_inputs(model) for each model"
            )
        if self.attached and not attached:
            raise ModelError(
                "model_inputs: the model was detached before its forward. Fix: detach after the forward"
            )
        return {"input_ids": self.as_subclass(torch.Tensor)} | self.make()


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
