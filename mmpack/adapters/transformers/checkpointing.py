"""Gradient checkpointing by a budget: the last layers run without recomputation, as many as memory takes.

A layer is recomputed where its own flag `gradient_checkpointing` says so, in every transformers; packs of other sizes
set it anew. Which end: the last layers' activations are gone before the first recomputation begins, so one kept layer
lies where a recomputed one would, and costs nothing. Kept at the other end it would cost one layer more.
"""

from __future__ import annotations

import functools
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from mmpack.adapters.transformers.layer_rules import layer_rules
from mmpack.adapters.transformers.linear_attention import has_linear_attention
from mmpack.adapters.transformers.modules import tower_of
from mmpack.adapters.transformers.parts import exchange_checkpoint
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError, check_flag, check_number, kind_of
from mmpack.ops.attention import choose, plan_of_rule
from mmpack.ops.linear_attention.choose import choose as choose_rule
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.planning.layer_bytes import chunks_of
from mmpack.planning.memory import Kept, Load, memory_model
from mmpack.versions import takes_encoded_media

KEPT = "_mmpack_kept_layers"  # on the decoder: the modules whose flag is off because of us
SELECTIVE = "_mmpack_selective_layers"  # on the decoder: modules with our checkpointing function, and their own
# Outputs that a selective layer keeps: matrix products, and attention by any of its backends.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = ("_scaled_dot_product", "varlen_attn", "flash_attn", "flex_attention")


class KeptLayers:
    """How many layers a call of `checkpoint_layers` keeps. `undo()`, or the end of a `with` block, recomputes all."""

    def __init__(self, decoder: torch.nn.Module, kept: Kept, expected: int):
        self.decoder = decoder
        self.layers = kept.layers  # of the decoder, the last ones
        self.blocks = kept.blocks  # of the tower, the last ones
        self.selective = kept.selective  # of the decoder, before those
        self.expected = expected  # bytes at the largest moment, beyond weights and gradients

    def __repr__(self) -> str:
        numbers = f"layers={self.layers}, blocks={self.blocks}, selective={self.selective}"
        return f"KeptLayers({numbers}, expected={self.expected:,})"

    def undo(self) -> None:
        _recompute_all(self.decoder)

    def __enter__(self) -> KeptLayers:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def checkpoint_layers(
    model: Any,
    batch: Batch | int,
    memory: int,
    selective: bool = False,
    dtype: torch.dtype | None = None,
) -> KeptLayers:
    """Let the last layers of a model with gradient checkpointing run without recomputation, as far as memory goes.

    Decoder layers first, then blocks of a tower that trains. Cheap: call it for each batch; every call starts from full
    checkpointing. Works with `attach`, PEFT, both kinds of `use_reentrant`, and compiled layers (which compile
    once for either case). Gradients are those of full checkpointing.

    Args:
        batch: packed or padded; or packed rows, all of them scored, without media.
        memory: bytes that activations may take: what weights, gradients and optimizer leave free, less some tenth for
            the allocator's gaps. Beside frozen weights, Liger or torch.compile less is used, see `planning.memory`.
        selective: beyond the first kept layer, keep the outputs of products and attention of as many layers as fit,
            and recompute the rest of them (norms, rotary, SwiGLU): half the bytes for all of the products. Torch's
            selective checkpointing looks at each op on the host, so it is for packs of many thousand rows, and not for
            compiled layers.
        dtype: of the activations; by default the weights', which under autocast is a bound from above. Pass FSDP2's
            `param_dtype`.

    Returns: a handle with `layers`, `blocks`, `selective`, and `undo`. Raises: ModelError where checkpointing is off,
    or on for some layers only; PlanError where the batch does not fit with everything recomputed; ArgumentError for
    models that `planning.memory` has no terms for.
    """
    check_number("checkpoint_layers", "memory", memory, least=0)
    check_flag("checkpoint_layers", "selective", selective)
    whole = unwrap(model, "checkpoint_layers")
    core = whole.model
    decoder, tower = core.get_decoder(), tower_of(core)
    _recompute_all(decoder)
    trains = any(p.requires_grad for p in tower.parameters())
    layers, blocks = _layers_of(decoder), _layers_of(tower) if trains else []
    _refuse_unchecked(decoder, [*layers, *blocks])
    weight = next(decoder.parameters())
    dtype = weight.dtype if dtype is None else dtype
    rule = choose_rule(weight.device, dtype) if has_linear_attention(whole) else None
    terms = memory_model(whole.config, str(dtype), _attention(weight.device, dtype), rule)
    load = _load_of(batch, whole)
    kept = terms.kept_layers(load, int(memory), trains, selective)
    first = len(layers) - kept.layers
    some = layers[first - kept.selective : first]
    setattr(decoder, SELECTIVE, [(layer, exchange_checkpoint(layer, _selective)) for layer in some])
    off = layers[first:] + blocks[len(blocks) - kept.blocks :]
    for layer in off:
        layer.gradient_checkpointing = False
    setattr(decoder, KEPT, off)
    expected = terms.peak(
        load,
        kept=kept.layers,
        kept_blocks=kept.blocks,
        selective=kept.selective,
        train_tower=trains,
    )
    return KeptLayers(decoder, kept, expected)


def _recompute_all(decoder: torch.nn.Module) -> None:
    for layer in vars(decoder).pop(KEPT, []):
        # off for the whole model since: stays so
        layer.gradient_checkpointing = decoder.gradient_checkpointing
    for layer, own in vars(decoder).pop(SELECTIVE, []):
        exchange_checkpoint(layer, functools.partial(_given_back, own))


def _given_back(own: Any, now: Any) -> Any:
    """The layer's own function, unless checkpointing was set anew since."""
    return own if _is_selective(now) else now


def _selective(own: Any) -> Any:
    """A layer's checkpointing function that keeps the outputs of products and attention."""
    if not (isinstance(own, functools.partial) and own.func is checkpoint):
        raise ModelError(
            "checkpoint_layers: the layers are not checkpointed by torch's function, which selective needs. "
            "Fix: call model.gradient_checkpointing_enable(), or pass selective=False"
        )
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(own, use_reentrant=False, context_fn=contexts)


def _is_selective(function: Any) -> bool:
    return isinstance(function, functools.partial) and "context_fn" in function.keywords


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    parts = str(op).split(".")  # aten.mm.default; flex_attention is not an overload
    name = parts[1] if len(parts) > 1 else parts[0]
    keeps = name in PRODUCTS or any(part in name for part in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _layers_of(part: torch.nn.Module) -> list[Any]:
    return [m for m in part.modules() if isinstance(m, GradientCheckpointingLayer)]


def _refuse_unchecked(decoder: torch.nn.Module, layers: list[Any]) -> None:
    off = sum(not layer.gradient_checkpointing for layer in layers)
    if off:
        raise ModelError(
            f"checkpoint_layers: {off} of {len(layers)} layers are not recomputed. "
            "Fix: call model.gradient_checkpointing_enable() first, for all layers"
        )
    if not decoder.training:
        raise ModelError(
            "checkpoint_layers: the model is in eval mode, where transformers recomputes nothing. "
            "Fix: call model.train()"
        )


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    """Which of the two kinds of attention that `memory_model` knows runs there."""
    fast = device.type == "cuda" and dtype in choose.HALF and choose.TREE.wanted() != "sdpa"
    return "sequences" if fast else "sdpa"


def _gathered(batch: Batch, model: Any) -> int:
    """Keys that a layer gathers; of layers with unlike rules the most."""
    rules = layer_rules(model, "checkpoint_layers")
    plans = [plan_of_rule(batch.attention_plan, r.window, r.two_way) for r in rules]
    return max(plan.gathered for plan in plans or [batch.attention_plan])


def _load_of(batch: Batch | int, model: Any) -> Load:
    """What the batch holds, read on the host. Media are encoded once each, or once per run of placeholders."""
    if isinstance(batch, Integral):
        return Load(int(batch), int(batch))
    if not isinstance(batch, Batch):
        raise ArgumentError(
            f"checkpoint_layers: batch is {kind_of(batch)}. "
            "Fix: pass a batch that mp.pack or mp.pad made, or a number of packed rows"
        )
    runs = [batch.media[i] for i in batch.media_order]
    once = isinstance(batch, PackedBatch) and takes_encoded_media(model)
    segments = batch.segment_plan
    return Load(
        rows=batch.input_ids.numel(),
        loss_tokens=batch.num_loss_tokens,
        patches=sum(medium.num_patches for medium in (batch.media if once else runs)),
        keys=_gathered(batch, model),
        vision_rows=sum(medium.num_tokens for medium in runs),
        chunks=0 if segments is None else int(chunks_of(np.diff(segments.offsets)).sum()),
        branches=0 if segments is None else int((segments.parents >= 0).sum()),
    )
