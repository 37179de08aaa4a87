"""The attention function "mmpack": row q sees row k exactly if k <= q < visible_until[k].

It reads `visible_until` ([T] or [B, S]) from the keyword arguments of the model's forward, and raises where the rule
can't be obeyed: with sdpa or eager the keyword is swallowed and a shared pack comes out wrong without a word.
`attention_plan` beside it lets fast kernels run on a GPU (see mmpack/ops/attention/); without one sdpa does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.families import family_of_model_type
from mmpack.ops.attention import AttentionPlan, resolve, tree_attention
from mmpack.pack.batch import Batch

NAME = "mmpack"
KEPT = "_mmpack_kept"  # on an attached model, so that copies have it: what to put back, the hooks


class Inside:
    """In the place of input_ids: makes them and more keywords, inside an attached model's forward."""

    def __init__(self, make: Callable[[], dict[str, Any]]):
        self.make = make

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Called by the embedding of a model that is not attached."""
        raise ModelError(
            "model_inputs: the model was detached before its forward. "
            "Fix: detach after it, or make the inputs again"
        )


class Attached:
    """A model whose text attention is mmpack's.

    `detach` gives it back its own; leaving a `with` block does too, but not inside another that is still open.
    """

    def __init__(self, model: Any, nested: bool):
        self.model = model  # as it was handed in
        self.nested = nested

    def detach(self) -> None:
        model = unwrap(self.model, "detach")
        original = vars(model).pop(KEPT, None)
        if original is not None:
            implementation, *hooks = original
            for hook in hooks:
                hook.remove()
            model.set_attn_implementation({"text_config": implementation})

    def __enter__(self) -> Any:
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.nested:
            self.detach()


def attach(model: Any) -> Attached:
    """Let the text model of a transformers VLM (or of one that PEFT wraps) obey `visible_until`.

    The vision tower keeps its attention. Returns a handle: `attach(model)` for good, or `with attach(model): …`, or
    `handle.detach()`.
    Raises: LayoutError (MM006) for an unknown family, ModelError for one that can't obey the rule.
    """
    whole = unwrap(model, "attach")
    family = family_of_model_type(whole.config.model_type)
    text = whole.config.get_text_config()
    if family.packing != "yes":
        raise ModelError(
            f"attach: {family.name} can't be packed (MM401). Fix: train it on padded batches (mp.pad)"
        )
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ModelError(
            "attach: the model has sliding-window layers, whose window packed rows would cross. "
            "Fix: load it with use_sliding_window=False"
        )
    AttentionInterface.register(NAME, visible_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    nested = is_attached(whole)
    if not nested:
        hooks = (
            whole.get_decoder().register_forward_pre_hook(_refuse_cache, with_kwargs=True),
            whole.model.register_forward_pre_hook(_make_inside, with_kwargs=True),
        )
        setattr(whole, KEPT, (text._attn_implementation, *hooks))
        whole.set_attn_implementation({"text_config": NAME})
    return Attached(model, nested)


def is_attached(model: Any) -> bool:
    """Whether the model's text attention is mmpack's."""
    config = unwrap(model, "is_attached").config
    return bool(config.get_text_config()._attn_implementation == NAME)


def planned(batch: Batch, model: Any) -> AttentionPlan:
    """The batch's attention plan, with backends chosen for the text model; its dropout counts in training alone."""
    plan = dataclasses.replace(batch.attention_plan)
    plan.check(batch.visible_until)
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dropout = getattr(text, "attention_dropout", 0.0) if model.training else 0.0
    resolve(plan, batch.visible_until, head_dim, dropout)
    return plan


def visible_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    visible_until: torch.Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    query [B, heads, T, d], key and value [B, kv heads, T, d] -> [B, T, heads, d].
    """
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    no_mask(attention_mask=attention_mask)
    _refuse_wrong_use(query, key, visible_until, kwargs)
    out = tree_attention(
        query,
        key,
        value,
        visible_until,  # type: ignore[arg-type]
        attention_plan,
        scale=scaling,
        dropout=dropout,
    )
    return out, None


def no_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """transformers' mask interface: `visible_until` is the whole rule, so a mask beside it is an error."""
    if attention_mask is not None:
        raise ModelError(
            "mmpack attention: an attention_mask is given too. "
            "Fix: leave it out, visible_until is the whole rule"
        )


def _make_inside(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the forward below the head: see `Inside`."""
    ids = kwargs.get("input_ids")
    return args, kwargs | ids.make() if isinstance(ids, Inside) else kwargs


def _refuse_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before the text model's forward: not every transformers tells attention of an empty cache."""
    if kwargs.get("use_cache") or (kwargs.get("use_cache") is None and module.config.use_cache):
        raise ModelError(
            "mmpack attention: use_cache is on. Fix: leave use_cache=False, as model_inputs sets it; detach to generate"
        )


def _refuse_wrong_use(
    query: torch.Tensor,
    key: torch.Tensor,
    visible_until: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    why = None
    if visible_until is None:
        why = "visible_until is missing", "call model(**batch.model_inputs(model)), or detach"
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
