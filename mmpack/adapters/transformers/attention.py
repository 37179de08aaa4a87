"""The attention function "mmpack": row q sees row k exactly if k <= q < visible_until[k].

It reads `visible_until` ([T] or [B, S]) from the keyword arguments of the model's forward, and raises where the rule
can't be obeyed: with sdpa or eager the keyword is swallowed and a shared pack comes out wrong without an error.
`attention_plan` given with it lets fast kernels run on a GPU (see mmpack/ops/attention/); without one sdpa does. Models
with sliding windows or two-way blocks need it: see layer_rules.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmpack.adapters.transformers.compile import are_compiled, has_compiled_text
from mmpack.adapters.transformers.guards import NO_MASK, BoundIds, NoMask, refuse_wrong_use
from mmpack.adapters.transformers.layer_rules import (
    KeptRules,
    LayerPlans,
    head_dim_of,
    layer_rules,
    plan_layers,
    plan_of_layer,
    plans_of_forward,
)
from mmpack.adapters.transformers.linear_attention import (
    check_segments,
    refuse_unknown_nets,
    take_segments,
)
from mmpack.adapters.transformers.parts import Part
from mmpack.adapters.transformers.rope import take_lengths
from mmpack.adapters.transformers.tower_attention import AUDIO_TOWER, TOWER
from mmpack.adapters.transformers.ulysses.heads import attend_by_heads
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, BackendError, ModelError, check_flag
from mmpack.families import Family, family_of_config
from mmpack.ops import first_use
from mmpack.ops.attention import SEQUENCES, TREE, AttentionPlan, resolve, tree_attention
from mmpack.ops.attention.choose import FLEX
from mmpack.ops.backend import implementation
from mmpack.ops.embeddings import MERGE_EMBEDDINGS
from mmpack.ops.logprobs.linear import LINEAR_SELECTED_LOGPROBS
from mmpack.ops.logprobs.lists import SUPPORT_LOGPROBS
from mmpack.ops.rows import GATHER_ROWS
from mmpack.packing.batch import Batch
from mmpack.versions import refuse_old_transformers

NAME = "mmpack"  # of the attention function
# on a model below its head: the parts that are attached for this forward
ENTERED = "_mmpack_entered"


class Attached:
    """A model whose attention is mmpack's.

    `detach` gives it back its own; leaving a `with` block does too, unless it lies within another one.
    """

    def __init__(self, model: Any, parts: list[Part]):
        self.model = model  # as it was handed in
        self.parts = parts  # that were not attached before

    def detach(self) -> None:
        detach(self.model)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: object) -> None:
        _detach(unwrap(self.model, "detach").model, self.parts)


def attach(model: Any, text: bool = True, tower: str = "auto") -> Attached:
    """Let the text model of a transformers VLM (or of one that PEFT or DDP wraps) obey `visible_until`.

    The vision tower, and an audio tower, get an attention too, which runs all windows and all media in one launch, with
    the tower's own numbers. Returns a handle: `attach(model)` until `detach(model)`, or `with attach(model): …`. A
    backward after detach is right: layers that gradient checkpointing runs again get the attention of their forward, or
    raise where another library than transformers or torch checkpoints them.

    Args:
        text: False: the tower only. The model stays its own for padded batches, masks, caches and `generate`.
        tower: "auto", or "keep": the tower keeps the attention that it has.

    Raises: LayoutError (MM006) for an unknown family, ModelError for one that can't obey the rule, ArgumentError for
    another `tower`, or where nothing is left to attach.
    """
    if tower not in ("auto", "keep"):
        raise ArgumentError(f"attach: tower is {tower!r}. Fix: use 'auto' or 'keep'")
    check_flag("attach", "text", text)
    if not text and tower == "keep":
        raise ArgumentError(
            "attach: text=False and tower='keep' leave nothing to attach. Fix: pass text=True, or tower='auto'"
        )
    whole = unwrap(model, "attach")
    if text:
        refuse_unpackable(whole)
    family = family_of_config(whole.config)
    parts = [TEXT] * bool(text) + towers_of(family) * (tower == "auto")
    load_kernels(next(whole.parameters()).device)
    return Attached(model, _attach(whole.model, parts))


def detach(model: Any) -> None:
    """Give text model and tower back the attention that they had before `attach`; nothing where it is not attached."""
    _detach(unwrap(model, "detach").model, PARTS)


def attach_in_forwards(model: Any) -> None:
    """Attach the model, and each deep copy of it, only while a forward that is given `visible_until` runs.

    Raises: as `attach` does.
    """
    whole = unwrap(model, "attach")
    refuse_unpackable(whole)
    load_kernels(next(whole.parameters()).device)
    core = whole.model
    if _enter not in core._forward_pre_hooks.values():
        core.register_forward_pre_hook(_enter, with_kwargs=True)
        core.register_forward_hook(_leave, always_call=True)  # after an error too


def is_attached(model: Any) -> bool:
    """Whether the model's text attention is mmpack's."""
    return TEXT.is_attached(unwrap(model, "is_attached").get_decoder())


def refuse_unpackable(whole: Any) -> None:
    """Raises as `attach` does."""
    family = family_of_config(whole.config)
    if family.packing != "yes":
        raise ModelError(
            f"attach: {family.name} can't be packed (MM401). Fix: train on padded batches (mp.pad)"
        )
    refuse_old_transformers(family, "attach")
    layer_rules(whole, "attach")
    refuse_unknown_nets(whole)


def towers_of(family: Family) -> list[Part]:
    """The towers that models of a family have."""
    return [TOWER] * (family.image_token_id is not None) + [AUDIO_TOWER] * (
        family.audio is not None
    )


def _attach(core: Any, parts: list[Part]) -> list[Part]:
    """Attach all of the parts or, with an error, none; those that were detached before."""
    for part in parts:
        part.refuse_unattachable(core)
    return [part for part in parts if part.attach(core)]


def _detach(core: Any, parts: list[Part]) -> None:
    """All of them, also where one raises."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.callback(part.detach, core)


def attention_plan_of(batch: Batch, model: Any) -> AttentionPlan | LayerPlans:
    """The batch's attention plan, with backends chosen for the text model; its dropout counts in training only.

    `LayerPlans` for a model with sliding windows or two-way blocks.
    """
    plan = dataclasses.replace(batch.attention_plan)
    text = model.config.get_text_config()
    dropout = getattr(text, "attention_dropout", 0.0) if model.training else 0.0
    without = FLEX if has_compiled_text(model) else ()
    if rules := layer_rules(model, "model_inputs"):
        return plan_layers(plan, rules, batch.visible_until, batch.visible_from, dropout, without)
    plan.check(batch.visible_until, batch.visible_from)
    resolve(plan, batch.visible_until, head_dim_of(text), dropout, without)
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
    attention_plan: AttentionPlan | LayerPlans | None = None,
    visible_from: torch.Tensor | None = None,
    row_split: RowSplit | None = None,
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
    if row_split is None:
        refuse_wrong_use(query, key, visible_until)
    window = kwargs.get("sliding_window")
    two_way, plan = plan_of_layer(attention_plan, module, window, query.shape[-1])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        until: Any = visible_until  # which is there
        return tree_attention(
            query,
            key,
            value,
            until,
            plan,
            visible_from=visible_from if two_way else None,
            window=window,
            scale=scaling,
            dropout=dropout,
        )

    def of_all_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        refuse_wrong_use(query, key, visible_until)
        return attend(query, key, value)

    if row_split is not None:
        return attend_by_heads(row_split, query, key, value, of_all_rows), None
    return attend(query, key, value), None


def no_mask(*, attention_mask: Any = None, **kwargs: Any) -> NoMask:
    """transformers' mask interface: `visible_until` is the whole rule, so a mask given with it is an error."""
    if not (attention_mask is None or isinstance(attention_mask, NoMask)):
        raise ModelError(
            "mmpack attention: an attention_mask was passed too. Fix: leave it out; visible_until is the whole rule"
        )
    return NO_MASK


def open_ids(core: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the forward below the head: opens `BoundIds`, and refuses positions that the model would count itself.

    Its own count runs on from sample to sample.
    """
    attached = TEXT.is_attached(core.get_decoder())
    if attached:
        _refuse_weights(core, kwargs)
    if attached and kwargs.get("visible_until") is not None and kwargs.get("position_ids") is None:
        raise ModelError(
            "mmpack attention: position_ids is missing, and the model's own count would run across samples. "
            "Fix: call model(**model_inputs(batch, model))"
        )
    if args and isinstance(args[0], BoundIds):  # as the forwards pass them that verl puts in
        args, kwargs = args[1:], kwargs | {"input_ids": args[0]}
    ids = kwargs.get("input_ids")
    if isinstance(ids, BoundIds):
        kwargs = kwargs | ids.open(core, attached)
    return args, kwargs


def _enter(core: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("visible_until") is not None:
        vars(core)[ENTERED] = _attach(core, [TEXT, *towers_of(family_of_config(core.config))])


def _leave(core: Any, args: Any, output: Any) -> None:
    _detach(core, vars(core).pop(ENTERED, []))


def open_ids_in_forward(core: Any) -> None:
    """Let the forward of a model that is not attached open `BoundIds`.

    The hook stays; other inputs pass through it as they are.
    """
    if open_ids not in core._forward_pre_hooks.values():
        core.register_forward_pre_hook(open_ids, with_kwargs=True)


def _refuse_cache(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before the text model's forward: not every transformers hands an empty cache to the attention.

    A batch's own plan, as a collator hands it over, becomes one for each rule of the layers.
    """
    if not TEXT.is_attached(decoder):
        return None  # a deep copy, which has the hook
    if kwargs.get("use_cache") or (kwargs.get("use_cache") is None and decoder.config.use_cache):
        raise ModelError(
            "mmpack attention: use_cache is on, and packed rows have no KV cache. "
            "Fix: keep use_cache=False, as model_inputs sets it; detach to generate"
        )
    _refuse_weights(decoder, kwargs)
    made = plans_of_forward(decoder, kwargs, FLEX if are_compiled(list(decoder.layers)) else ())
    more: dict[str, Any] = {} if made is None else {"attention_plan": made}
    if (
        getattr(decoder.config, "num_kv_shared_layers", 0)
        and kwargs.get("visible_until") is not None
    ):
        # such a decoder cuts rows, and masks with them, by any whole number
        more["logits_to_keep"] = slice(None)
    return (args, kwargs | more) if more else None


def _refuse_weights(module: Any, kwargs: dict[str, Any]) -> None:
    """Raise ModelError where attention weights are asked for, by the call or by the module's config."""
    if kwargs.get("output_attentions", getattr(module.config, "output_attentions", False)):
        raise ModelError(
            "mmpack attention: output_attentions is on, and packed rows have no attention weights. "
            "Fix: leave it out; detach and set the attention to eager for the weights of one sample"
        )


def _check_segments(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return check_segments(decoder, args, kwargs) if TEXT.is_attached(decoder) else None


def _register() -> None:
    AttentionInterface.register(NAME, visible_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def _hook(core: Any) -> list[Any]:
    take_segments(core)
    take_lengths(core)
    decoder = core.get_decoder()
    return [
        KeptRules(core),
        core.register_forward_pre_hook(open_ids, with_kwargs=True),
        decoder.register_forward_pre_hook(_refuse_cache, with_kwargs=True),
        decoder.register_forward_pre_hook(_check_segments, with_kwargs=True),
    ]


def _decoder(core: Any) -> torch.nn.Module:
    decoder: torch.nn.Module = core.get_decoder()
    return decoder


TEXT = Part("text model", NAME, _decoder, _register, _hook)
PARTS = [TEXT, TOWER, AUDIO_TOWER]


OPS = (MERGE_EMBEDDINGS, GATHER_ROWS, LINEAR_SELECTED_LOGPROBS, SUPPORT_LOGPROBS)


def load_kernels(device: torch.device) -> None:
    """Import what runs on `device`; what MMPACK_BACKEND and its like name wrongly is refused where it would run."""
    if device.type != "cuda":
        return
    for op in OPS:
        with contextlib.suppress(BackendError):
            implementation(op, device)
    for chooser in (TREE, SEQUENCES):
        with contextlib.suppress(BackendError):
            takes = chooser.wanted() in ("auto", "flash_attn_4", "flex_flash")
            if takes and chooser.explain(device)["flash_attn_4"] is None:
                first_use.flash_attn_4_interface()
