"""What goes into `model(**…)` of a Megatron model for a pack: ids, mRoPE positions, and the rule with the media."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmpack.adapters.megatron.attention import ATTACHED
from mmpack.adapters.megatron.experts import refuse_routes
from mmpack.adapters.megatron.modules import pad_multiple, refuse_first, unwrap
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.transformers.ulysses.heads import repeats
from mmpack.adapters.transformers.ulysses.make import split_rows
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.ops.attention import resolve
from mmpack.packing.batch import PackedBatch
from mmpack.packing.media import held_pixels


def model_inputs(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Keyword arguments of the forward of a GPTModel, or of a VLM around one, on every pipeline stage alike.

    Args:
        batch: of `mp.pack(…, pad_to_multiple_of=pad_multiple(model))`, on the model's device, the same on all ranks
            that tensor, context and pipeline parallelism join. Its media must have pixels on the first stage.
        model: attached; one chunk of it.

    Returns: input_ids [1, t], position_ids ([3, 1, t] of an mRoPE model, else [1, t]), attention_mask None, and in
    `packed_seq_params` the rule. t are T rows, or this context parallel rank's.
    Raises: ModelError for a model that is not attached, or lacks the batch's ids, media, positions or experts;
    SchemaError (MM404) for missing pixels; ArgumentError for what is no pack, or differs on context parallel ranks.
    """
    return arguments_of(rows_of(batch, model, "model_inputs"))


def arguments_of(rows: Rows) -> dict[str, Any]:
    """The forward's."""
    return {
        "input_ids": rows.ids,
        "position_ids": rows.positions,
        "attention_mask": None,
        "packed_seq_params": rows,
    }


def rows_of(batch: PackedBatch, model: Any, what: str) -> Rows:
    """The rule of a batch for this model. Raises: as `model_inputs`, as `what`."""
    if not isinstance(batch, PackedBatch):
        raise ArgumentError(f"{what}: batch is {kind_of(batch)}. Fix: pass what mp.pack returned")
    whole, language = unwrap(model, what)
    if ATTACHED not in vars(whole):
        raise ModelError(
            f"{what}: the model's attention ignores visible_until. Fix: call mmpack.adapters.megatron.attach(model)"
        )
    batch.check_unchanged()
    config = language.config
    mrope = language.position_embedding_type == "mrope"
    _refuse_other(batch, whole, language, mrope, what)
    if batch.media and whole.pre_process:
        held_pixels(batch.media, what)
    if batch.routed_experts is not None:
        refuse_routes(language, batch.routed_experts, batch.last_expert or 0)
    multiple = pad_multiple(model)
    if len(batch.input_ids) % multiple:
        raise ModelError(
            f"{what}: the batch has {len(batch.input_ids)} rows, this model takes multiples of {multiple}. "
            "Fix: call mp.pack(…, pad_to_multiple_of=pad_multiple(model))"
        )
    groups, split = language.pg_collection, None
    if groups.cp.size() > 1:
        heads = config.num_attention_heads // groups.tp.size()
        repeats(max(config.num_query_groups // groups.tp.size(), 1), heads, groups.cp.size())
        split = split_rows(batch, groups.cp, what)
    plan = dataclasses.replace(batch.attention_plan)
    plan.check(batch.visible_until)
    resolve(plan, batch.visible_until, config.kv_channels)
    return Rows.of(batch, split, mrope, plan=plan)


def _refuse_other(batch: PackedBatch, whole: Any, language: Any, mrope: bool, what: str) -> None:
    family, media = batch.family_of(), bool(batch.media)
    image = getattr(whole, "image_token_id", family.image_token_id)
    low, high = batch.id_range or (0, 0)
    odd, last = low if low < 0 else high, language.vocab_size - 1
    heard = any(m.modality == "audio" for m in batch.media)
    kind, rows = language.position_embedding_type, family.position_rows
    there = "train on it by mmpack.adapters.transformers"
    own = "make the samples with this model's processor"
    tokens = f"the model's image token is {image}, {family.name}'s is {family.image_token_id}"
    alone = "the batch has media, and the model is a GPTModel alone"
    refuse_first(
        what,
        (batch.visible_from is not None, f"{family.name} has two-way media", there),
        (batch.segment_plan is not None, f"{family.name} has linear attention", there),
        (media and whole is language, alone, "pass the VLM around it"),
        (heard, "the batch has audio", there),
        (media and mrope != (rows > 1), f"positions are {kind}, the family has {rows} rows", own),
        (media and image != family.image_token_id, tokens, own),
        (low < 0 or high > last, f"the batch has id {odd}, the model's are 0 to {last}", own),
    )
