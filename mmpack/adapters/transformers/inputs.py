"""What goes into `model(**…)` for a batch: T rows (or [B, S]), each medium encoded once where the forward allows it.

What the vision tower is given lies in `tower`; what keeps other models from these inputs in `guards`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from mmpack.adapters.transformers.attention import (
    attention_plan_of,
    is_attached,
    open_ids_in_forward,
)
from mmpack.adapters.transformers.guards import BoundIds, take_labels_of
from mmpack.adapters.transformers.linear_attention import KEYWORD as SEGMENTS
from mmpack.adapters.transformers.linear_attention import has_linear_attention
from mmpack.adapters.transformers.media_inputs import (
    encoded_inputs,
    heard_inputs,
    inputs_without_media,
    pixel_inputs,
    token_types,
)
from mmpack.adapters.transformers.rope import KEYWORD as ROPE_LENGTHS
from mmpack.adapters.transformers.rope import lengths_of, rope_rules, take_lengths
from mmpack.adapters.transformers.routes import KEYWORD, routes_of
from mmpack.adapters.transformers.tower import (
    Features,
    has_sharded_tower,
    tile_patches,
    tower_and_projector,
)
from mmpack.adapters.transformers.ulysses.make import cut_in_decoder, row_split
from mmpack.adapters.transformers.ulysses.media import split_inputs
from mmpack.adapters.transformers.ulysses.split import KEYWORD as ROW_SPLIT
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.adapters.transformers.unwrap import (
    is_parallel,
    is_sharded,
    unwrap,
    warn_of_wrapper,
)
from mmpack.cache.features import FeatureStore
from mmpack.cache.summed import SummedFeatures
from mmpack.errors import (
    ArgumentError,
    ModelError,
    SchemaError,
    check_whole,
    kind_of,
)
from mmpack.families import Family, family_of_config
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.calls import NONE, Counts, most_of
from mmpack.packing.media import held_pixels, patch_offsets
from mmpack.packing.pad import PaddedBatch
from mmpack.schema.rules import Problem
from mmpack.versions import refuse_old_forward, refuse_old_transformers, takes_encoded_media


def model_inputs(
    batch: Batch,
    model: Any,
    vision: str = "auto",
    *,
    features: Features | None = None,
    max_patches: int | None = None,
    sequence_group: Any = None,
) -> dict[str, Any]:
    """Keyword arguments of a transformers VLM's forward, always with `use_cache=False`.

    A packed batch needs `attach(model)`. A padded one goes either way: attached by `visible_until`, else by
    `attention_mask`; it encodes a medium once per occurrence, as frameworks do.
    The inputs are for this model's forward, attached if it is attached now: any other raises. What depends on weights
    is made in the forward (see `BoundIds`), so the same inputs may be used again after a step of the optimizer. After
    the forward `batch.stats["patches_encoded"]` says what the tower ran. `routed_experts` of a batch are replayed: the
    model's routers take these experts, and weigh them by their own logits.

    Args:
        batch: packed or padded; its media must have pixels.
        model: a transformers model, or PEFT's or DDP's wrapper of one. Pass the outermost wrapper: `ddp.module` trains
            without reducing gradients, which warns.
        vision: "always": a tower that has no medium of the batch runs the smallest one, with weight exactly 0.
            "auto": where FSDP2 or ZeRO-3 shards a tower, it runs as often as `batch.tower_runs` says (`PackLoader` and
            `in_step` set it), and once if that is None. Before transformers 5.19 a batch without media can't run it:
            ModelError if `tower_runs` is above 0. An unsharded tower runs only for media, for nobody waits for it:
            under DistributedDataParallel, which waits for gradients, all its weights get one, if only 0.
        features: where encoded media are kept: a `FeatureStore` of a tower that is not trained, or what `encode_once`
            yields. Of a packed batch; transformers 5.19 or newer.
        max_patches: the tower runs whole media in chunks of at most so many patches (one larger medium by itself), and
            with gradients checkpoints each chunk unless it checkpoints its layers already. As `features` otherwise.
        sequence_group: a ProcessGroup whose ranks share the rows of this batch, which each of them holds: the inputs
            are those of this rank's rows, and each medium is encoded on one rank (before transformers 5.19 on all). See
            docs/sequence_parallel.md.

    Returns: input_ids and position_ids, `visible_until` [T] int32 (and `visible_from`, of a family with two-way media)
    and `attention_plan` (or attention_mask), use_cache, with linear attention `segment_plan`, with media their encoded
    features, or pixels and grids, with routes `routed_experts`, with RoPE that depends on length `rope_lengths`. Don't
    add `labels`, which transformers' loss shifts by a row: with a pack of shared prefixes the forward refuses them,
    with another one where a sample's first label is not -100.
    Raises: ModelError for a model that would ignore the rule, or lacks the batch's ids or experts; SchemaError (MM404)
    for missing pixels; ArgumentError for other options, for what is no batch, and for rows changed since.
    """
    split = row_split(batch, model, sequence_group, "model_inputs")
    return inputs_of(batch, model, vision, features, max_patches, split)


def inputs_of(
    batch: Batch,
    model: Any,
    vision: str,
    features: Features | None,
    max_patches: int | None,
    split: RowSplit | None,
) -> dict[str, Any]:
    """`model_inputs`, of this rank's rows where the batch is split."""
    if vision not in ("auto", "always"):
        raise ArgumentError(f"model_inputs: vision is {vision!r}. Fix: use 'auto' or 'always'")
    if not isinstance(batch, Batch):
        raise ArgumentError(
            f"model_inputs: {type(batch).__name__} is not a batch. Fix: pass what mp.pack returned"
        )
    joined, outermost = is_parallel(model), model
    model = unwrap(model, "model_inputs")
    warn_of_wrapper(outermost, model, "model_inputs")
    take_labels_of(outermost, model, *([outermost.module] if joined else []))
    family = family_of_config(model.config)
    refuse_old_transformers(family, "model_inputs")
    refuse_other_batch(batch, model, "model_inputs", not isinstance(features, SummedFeatures))
    if features is not None or max_patches is not None:
        refuse_options(model, features, max_patches, "model_inputs")
        if not isinstance(batch, PackedBatch):
            raise ModelError(
                "model_inputs: a padded batch is encoded by the model's forward, without features and max_patches. "
                "Fix: pass mp.pack"
            )
    attached = is_attached(model)
    inputs: dict[str, Any] = {"use_cache": False}
    if isinstance(batch, PackedBatch):
        if not attached:
            raise ModelError(
                "model_inputs: the model's attention ignores visible_until. "
                "Fix: call mmpack.adapters.transformers.attach(model)"
            )
        ids, positions, key = batch.input_ids[None], batch.position_ids[:, None], "visible_until"
    else:
        assert isinstance(batch, PaddedBatch)
        ids, positions = batch.input_ids, batch.position_ids
        key = "visible_until" if attached else "attention_mask"
    own = slice(None) if split is None else split.own
    whole = split is not None and bool(batch.media) and not takes_encoded_media(model)
    if whole:  # its forward encodes media, and takes all rows for that
        cut_in_decoder(model)
    else:
        ids, positions = ids[:, own], positions[..., own]
    if split is not None:
        _refuse_summed(features)
        inputs[ROW_SPLIT] = split
    inputs["position_ids"] = positions if family.position_rows > 1 else positions[0]
    inputs[key] = getattr(batch, key)
    if attached and batch.visible_from is not None:
        inputs["visible_from"] = batch.visible_from
    if rules := rope_rules(model):
        take_lengths(model)
        inputs[ROPE_LENGTHS] = lengths_of(batch, rules, "model_inputs")[:, own]
    if attached:
        inputs["attention_plan"] = attention_plan_of(batch, model)
        if has_linear_attention(model):
            if batch.segment_plan is None:
                raise ModelError(
                    "model_inputs: the batch has no segment_plan, which the model's linear attention needs; "
                    f"{batch.family} declares none. Fix: make samples of a family with linear_attention=True"
                )
            inputs[SEGMENTS] = batch.segment_plan
    else:
        if family.token_types is not None:
            inputs[family.token_types] = token_types(batch.input_ids, family)
    if batch.routed_experts is not None:
        routes_of(batch, model, "model_inputs")
        inputs[KEYWORD] = batch.routed_experts[own]
    batch.stats["patches_encoded"] = 0
    make: Callable[[], dict[str, Any]] | None = None
    least = _least_runs(batch, model, vision, features, attached)
    joined = joined and not has_sharded_tower(model) and tower_and_projector(model).trains
    if not batch.media:
        if joined or least != NONE or isinstance(features, SummedFeatures):
            given = batch, model, ids, features, joined, least
            make = functools.partial(inputs_without_media, *given)
    elif split is not None and isinstance(batch, PackedBatch) and not whole:
        options = features, max_patches, joined, least
        make = functools.partial(split_inputs, batch, model, ids, split, *options)
    elif isinstance(batch, PackedBatch) and takes_encoded_media(model):
        make = functools.partial(
            encoded_inputs, batch, model, ids, features, max_patches, joined, least
        )
    else:  # the model's forward encodes
        inputs |= pixel_inputs(batch, model)
        if any(m.modality == "audio" for m in batch.media):
            make = functools.partial(heard_inputs, batch, model, ids)
    if not attached:
        if (
            make is None and not {KEYWORD, ROPE_LENGTHS} & inputs.keys()
        ):  # any model of the family may take these
            return inputs | {"input_ids": ids}
        open_ids_in_forward(model.model)
    return inputs | {"input_ids": BoundIds(ids, model.model, attached, make or dict, batch)}


def refuse_other_batch(batch: Batch, model: Any, what: str, pixels: bool = True) -> None:
    """Raise, as `what`, for a batch of another model: ids, media and, unless they are not read, pixels."""
    family = family_of_config(model.config)
    batch.check_unchanged()
    _refuse_other_ids(batch, model.config, family, what)
    _refuse_other_media(batch, model.config, family, what, pixels)


def packs_of(packs: Any, whole: Any, what: str, pixels: bool = True) -> list[PackedBatch]:
    """`packs`, a new list of them; `pixels`: they have some. Raises: ArgumentError, ModelError, SchemaError."""
    if isinstance(packs, Batch) or not isinstance(packs, Iterable):
        raise ArgumentError(
            f"{what}: packs is {kind_of(packs)}. Fix: pass a list of batches that mp.pack made"
        )
    packs = list(packs)
    for pack in packs:
        if not isinstance(pack, PackedBatch):
            raise ArgumentError(
                f"{what}: packs has a {type(pack).__name__}. Fix: pass batches that mp.pack made"
            )
        refuse_other_batch(pack, whole, what, pixels)
    return packs


def refuse_options(model: Any, features: Any, max_patches: int | None, what: str) -> None:
    """Raise for `features` or `max_patches` that aren't such, or that this model can't have."""
    if max_patches is not None:
        check_whole(what, "max_patches", max_patches)
    if not (features is None or isinstance(features, FeatureStore | SummedFeatures)):
        raise ArgumentError(
            f"{what}: features is {kind_of(features)}. Fix: pass a FeatureStore, or what encode_once yields"
        )
    refuse_old_forward(model, what, "leave out features and max_patches")
    if isinstance(features, SummedFeatures):  # which all ranks made together
        return
    if has_sharded_tower(model):
        raise ModelError(
            f"{what}: the vision tower is sharded (FSDP2, ZeRO-3), and a rank that calls it more often than "
            "others would wait forever. "
            "Fix: leave features and max_patches out, shard the text model's layers only, or encode a "
            "whole step by encode_together (FSDP2)"
        )


def _refuse_summed(features: Features | None) -> None:
    """Raise for media that the ranks of a sequence_group can't share."""
    if isinstance(features, SummedFeatures):
        raise ModelError(
            "model_inputs: encode_once and encode_together don't share media over sequence_group. "
            "Fix: leave out one of the two"
        )


def _least_runs(
    batch: Batch, model: Any, vision: str, features: Features | None, attached: bool
) -> Counts:
    """How often each tower runs for `batch`, at least."""
    if isinstance(features, SummedFeatures):  # of which all ranks have theirs
        return NONE
    once = Counts(1, int(batch.family_of().audio is not None))
    known = getattr(batch, "tower_runs", None)
    if vision == "always":
        least = most_of([once, known or once])
    elif has_sharded_tower(model):
        can_idle = attached and takes_encoded_media(model)
        least = known or (once if known is None and can_idle else NONE)
    else:
        return NONE
    if not batch.media and least != NONE:
        _refuse_idle_tower(model, attached)
    return least


def _refuse_idle_tower(model: Any, attached: bool) -> None:
    if not is_sharded(model):
        return
    if not attached:
        raise ModelError(
            "model_inputs: the model is sharded, and its own attention is still on. "
            "Fix: call mmpack.adapters.transformers.attach(model)"
        )
    # its own forward runs the tower at another place than an idle one
    refuse_old_forward(model, "model_inputs", "put media into every batch: the model is sharded")


def _refuse_other_ids(batch: Batch, config: Any, family: Family, what: str) -> None:
    """Ids that the model lacks, or reads as something else than the batch means."""
    if not batch.family_of().same_layout(family):
        raise ModelError(
            f"{what}: the batch is of {batch.family}, the model of {family.name}. "
            "Fix: make the samples with this model's processor"
        )
    image_id = getattr(config, "image_token_id", None)
    if image_id != family.image_token_id:
        raise ModelError(
            f"{what}: the model's image token is {image_id}, {family.name}'s is "
            f"{family.image_token_id}. Fix: use a checkpoint of this family's vocabulary"
        )
    assert batch.id_range is not None  # set when the batch was made
    low, high = batch.id_range
    size = config.get_text_config().vocab_size
    if low < 0 or high >= size:
        raise ModelError(
            f"{what}: the batch has id {low if low < 0 else high}, the model's ids are 0 to {size - 1}. "
            "Fix: wrap this model's processor, or resize the model's embeddings"
        )


def _refuse_other_media(batch: Batch, config: Any, family: Family, what: str, pixels: bool) -> None:
    """Media without pixels, pixels cut after packing, and tiles of another size than the tower's only one."""
    if pixels:
        held_pixels(batch.media, what)
    for m in batch.media:
        if family.pixel_layout == "tiles" and tuple(m.grid_thw[1:]) != (
            size := tile_patches(config, family)
        ):
            raise ModelError(
                f"{what}: {m.media_id!r:.60} has tiles of {list(m.grid_thw[1:])} patches, "
                f"the model's tower reads {list(size)}. Fix: make the samples with this model's processor"
            )
    if batch.media and pixels:
        _refuse_cut_pixels(batch, family, what)


def _refuse_cut_pixels(batch: Batch, family: Family, what: str) -> None:
    """Rows of pixels that were cut or added after packing: each medium would read its neighbour's."""
    held = {
        "pixel_values": (batch.pixel_values, False, "image"),
        "audio_features": (batch.audio_features, True, "audio"),
    }
    for name, (whole, audio, modality) in held.items():
        mine = [m for m in batch.media if (m.modality == "audio") == audio]
        if not mine:
            continue
        rows = patch_offsets(batch.media, audio)[-1]
        expected = [rows, family.pixel_shape((1, 1, 1), modality)[1]]
        if whole is None or list(whole.shape) != expected:
            found = "is missing" if whole is None else f"has shape {list(whole.shape)}"
            why = f"{found}, the batch's media need {expected}"
            raise SchemaError([Problem("MM404", mine[0].media_id, name, why)], what)
