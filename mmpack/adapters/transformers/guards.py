"""Stand-ins for input_ids and the attention mask that fail where a forward would ignore mmpack's rule.

`model_inputs` hands `BoundIds` to one model's forward, with which labels of rows that can't be shifted are refused. The
attention "mmpack" hands `NO_MASK` to its own layers. A
model that was detached, another model, or another attention raises when it uses them: no wrong number comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmpack.errors import ModelError
from mmpack.packing.batch import Batch, PackedBatch

IGNORED = -100  # transformers' label of a token that is not scored


class BoundIds:
    """input_ids [B, S] that only one model's forward takes; it makes the inputs that depend on weights there.

    Reads as the int64 tensor does: shape, device, indexing, torch functions. An embedding refuses it, and every
    transformers forward starts with one: so only a forward that calls `open` first goes on. It is no subclass of
    Tensor, because torch.compile would look into one.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        core: torch.nn.Module,
        attached: bool,
        make: Callable[[], dict[str, Any]],
        batch: Batch,
    ):
        self.ids = ids
        self.batch = batch  # of these ids
        self.core = core  # the model below the head
        self.attached = attached  # whether its attention must be mmpack's
        self.make = make  # further keywords of the forward: encoded media, for one

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "embedding":
            raise ModelError(
                "model_inputs: the model was detached before its forward, or these inputs were made for "
                "another model. Fix: detach after the forward; call model_inputs(batch, model) for each model"
            )
        return func(*(a.ids if isinstance(a, BoundIds) else a for a in args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there are ids
            raise AttributeError(name)
        return getattr(self.ids, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, *args: Any, **kwargs: Any) -> BoundIds:
        return self._with(self.ids.to(*args, **kwargs))

    def clone(self) -> BoundIds:
        return self._with(self.ids.clone())

    def _with(self, ids: torch.Tensor) -> BoundIds:
        return BoundIds(ids, self.core, self.attached, self.make, self.batch)

    def open(self, core: torch.nn.Module, attached: bool) -> dict[str, Any]:
        """The forward's own keywords: the tensor of ids, and what `make` adds.

        Args: `core`: the model whose forward runs. `attached`: whether its attention is mmpack's now.
        Raises: ModelError for another model, or one that was detached.
        """
        if core is not self.core:
            raise ModelError(
                "model_inputs: these inputs were made for another model, encoded media included. "
                "Fix: call model_inputs(batch, model) for each model"
            )
        if self.attached and not attached:
            raise ModelError(
                "model_inputs: the model was detached before its forward. Fix: detach after the forward"
            )
        return {"input_ids": self.ids} | self.make()


def refuse_labels(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a model's forward: labels that transformers' loss, which shifts them by a row, scores by another sample.

    Raises ModelError for those of a pack with shared prefixes, and of the first token of a sample in any pack.
    """
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if not (isinstance(ids, BoundIds) and isinstance(ids.batch, PackedBatch)):
        return
    if labels is None or kwargs.get("shift_labels") is not None:  # which are shifted already
        return
    starts, why = ids.batch.cu_seqlens, "the row after a prefix is of one of its samples only"
    if starts is not None:
        if (labels.flatten()[starts[1:-1].to(labels.device)] == IGNORED).all():
            return
        why = f"a sample's first label is not {IGNORED}, and the row before it is of another sample"
    raise ModelError(
        f"model_inputs: labels are given beside packed rows, which transformers' loss shifts by a row, and {why}. "
        "Fix: take the loss of packed_logprobs(model, batch), or pack by SampleCollator"
    )


def take_labels_of(*models: torch.nn.Module) -> None:
    """Let the forwards of these models refuse labels as `refuse_labels` does. The hook stays."""
    for model in models:
        if refuse_labels not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(refuse_labels, with_kwargs=True)


class OtherAttention(ModelError, AttributeError):
    """Another attention than mmpack's used `NO_MASK`. Also an AttributeError: `hasattr(NO_MASK, …)` is False."""


class NoMask:
    """In the place of the attention mask: `visible_until` is the whole rule, and any other attention fails on this.

    Gradient checkpointing that mmpack doesn't know runs layers again after detach, by the model's own attention. That
    attention reads its mask, and so comes to an error.
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
            "mmpack attention: another attention got these rows: after detach, gradient checkpointing repeats "
            "the forward in backward. Fix: detach after backward, or turn on transformers' checkpointing before attach"
        )


NO_MASK = NoMask()


def refuse_wrong_use(
    query: torch.Tensor,
    key: torch.Tensor,
    visible_until: torch.Tensor | None,
) -> None:
    """Raise ModelError, before attention runs, where visible_until is missing or is not of these rows."""
    why = None
    if visible_until is None:
        why = "visible_until is missing", "call model(**model_inputs(batch, model)), or detach"
    elif query.shape[2] != key.shape[2]:
        why = (
            f"{key.shape[2]} keys for {query.shape[2]} queries, so a KV cache is on",
            "pass use_cache=False and no past_key_values; detach to generate",
        )
    elif visible_until.shape[-1] != key.shape[2] or visible_until.numel() not in (
        key.shape[2],
        key.shape[0] * key.shape[2],
    ):
        why = (
            f"visible_until has shape {list(visible_until.shape)}, there are "
            f"{key.shape[0]} × {key.shape[2]} keys",
            "pass the batch's own",
        )
    if why is not None:
        raise ModelError(f"mmpack attention: {why[0]}. Fix: {why[1]}")
