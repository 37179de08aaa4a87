"""`attach`: the layers of a GPTModel obey `visible_until`, where `packed_seq_params` is what `model_inputs` made.

With anything else the model runs as it did. No module is replaced, so names in checkpoints stay: forwards of the core
attentions (and of a VLM) are, on the instances, and hooks say to a layer's router which rows come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor

from mmpack.adapters.megatron.experts import watch_router
from mmpack.adapters.megatron.modules import cores, other_forward, refuse_unpackable, unwrap
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.megatron.vision import Tower, forward_with_media, tower_of
from mmpack.adapters.transformers.ulysses.heads import attend_by_heads
from mmpack.errors import ModelError
from mmpack.ops.attention import plan_sequences, sequence_attention, tree_attention

ATTACHED = "_mmpack_attached"


class Attached(ExitStack):
    """A model whose attention is mmpack's, until `detach`, or the end of a `with` block."""

    def __init__(self, model: Any, chunks: list[Any]):
        super().__init__()
        self.model = model  # as it was handed in
        self.chunks = chunks  # that were not attached before
        for chunk in chunks:
            self.callback(detach, chunk)

    detach = ExitStack.close

    def __enter__(self) -> Any:
        return self.model


def attach(model: Any, tower: Tower | None = None) -> Attached:
    """Let a Megatron model run packs: a GPTModel or a VLM around one, wrapped or not, or the list of its chunks.

    Its specs may be local ones, Transformer Engine's or a bridge's, and layers may be recomputed, whole or selectively.
    Forwards without `model_inputs` stay as they are. Handing the model in again does nothing.

    Args:
        tower: pixels [patches, patch_dim] and grids int64 [M, 3] -> features [tokens, H] of media after media, or
            (features, deepstack levels). By default that of the model, if it is of a known kind: mbridge's Qwen2.5-VL,
            Megatron-Bridge's Qwen2.5-VL and Qwen3-VL.

    Raises: ModelError for a model that can't obey, by the option that keeps it from that.
    """
    chunks = model if isinstance(model, list) else [model]
    found = [unwrap(chunk, "attach") for chunk in chunks]
    for _, language in found:
        refuse_unpackable(language)
        cores(language.decoder)
    new = [own for own in found if ATTACHED not in vars(own[0])]
    for whole, language in new:
        vars(whole)[ATTACHED] = _attach(whole, language, tower)
    return Attached(model, [whole for whole, _ in new])


def detach(model: Any) -> None:
    """Give a model, or a list of chunks, back its own forwards; nothing where it is not attached.

    A backward whose layers are recomputed must run before.
    """
    for chunk in model if isinstance(model, list) else [model]:
        whole, _ = unwrap(chunk, "detach")
        vars(whole).pop(ATTACHED, ExitStack()).close()


def _attach(whole: Any, language: Any, tower: Tower | None) -> ExitStack:
    undo = ExitStack()
    first = whole is not language and whole.pre_process
    if first and tower is None:
        tower = tower_of(whole)
    for core in cores(language.decoder):
        undo.enter_context(
            other_forward(core, functools.partial(_visible, language.config, core.forward))
        )
    positions = functools.partial(_own_positions, language)
    undo.callback(language.decoder.register_forward_pre_hook(positions, with_kwargs=True).remove)
    for layer in language.decoder.layers:
        watch_router(undo, layer)
    # a tower of Megatron's own layers, whose windows come as `packed_seq_params`
    block = getattr(getattr(whole, "vision_model", None), "decoder", None) if first else None
    for core in cores(block) if block is not None else ():
        undo.enter_context(other_forward(core, functools.partial(_in_sequences, core.forward)))
    if whole is not language:
        own = whole.forward
        undo.enter_context(
            other_forward(whole, functools.partial(forward_with_media, whole, language, tower, own))
        )
    return undo


def _visible(
    config: Any,
    own: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Core attention: query [t, 1, heads, d] or [t, heads, d], of this rank's heads -> [t, 1, heads · d]."""
    rows = packed_seq_params
    if not isinstance(rows, Rows):
        given = {"attention_bias": attention_bias, "packed_seq_params": rows} | kwargs
        return own(query, key, value, attention_mask, *args, **given)
    if attention_mask is not None or attention_bias is not None:
        raise ModelError(
            "mmpack attention: an attention_mask or attention_bias was passed too. "
            "Fix: leave it out; visible_until is the whole rule"
        )
    q, k, v = (x.reshape(len(x), *x.shape[-2:]).transpose(0, 1)[None] for x in (query, key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        until = rows.batch.visible_until
        out: Tensor = tree_attention(q, k, v, until, rows.plan, scale=config.softmax_scale)
        return out

    split = rows.split
    out = attend(q, k, v) if split is None else attend_by_heads(split, q, k, v, attend)
    return out[0].reshape(out.shape[1], 1, -1)


def _in_sequences(
    own: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A tower's core attention over its windows or frames: [t, heads, d] -> [t, heads, d], all in one launch."""
    packed = kwargs.get("packed_seq_params")
    plan = None if packed is None else getattr(packed.cu_seqlens_q, "_mmpack_plan", None)
    if plan is None and packed is not None and packed.qkv_format == "thd":
        plan = plan_sequences(np.diff(packed.cu_seqlens_q.cpu().numpy()))
        packed.cu_seqlens_q._mmpack_plan = plan  # of all layers that see these windows
    if plan is None:
        return own(query, key, value, *args, **kwargs)
    q, k, v = (x.reshape(len(x), *x.shape[-2:]).transpose(0, 1)[None] for x in (query, key, value))
    out: Tensor = sequence_attention(q, k, v, plan)[0]
    return out.reshape(query.shape)


def _own_positions(language: Any, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before the decoder: rotary tables of one sequence become those of the rows. mRoPE's are of positions already."""
    rows, table = kwargs.get("packed_seq_params"), kwargs.get("rotary_pos_emb")
    if not isinstance(rows, Rows) or table is None or language.position_embedding_type == "mrope":
        return None
    return args, kwargs | {
        "rotary_pos_emb": table.index_select(0, rows.positions[0].to(table.device))
    }
