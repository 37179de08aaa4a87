"""What goes into `model(**…)` for a batch: T rows (or [B, S]), each medium encoded once where the forward allows it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from mmpack.adapters.transformers.attention import expect_ids, is_attached, planned
from mmpack.adapters.transformers.guards import Ids
from mmpack.adapters.transformers.unwrap import is_parallel, is_sharded, unwrap
from mmpack.errors import ArgumentError, ModelError, SchemaError, installed_version
from mmpack.families import Family, family_of_model_type
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.media import patch_offsets, tiles_of
from mmpack.packing.pad import PaddedBatch
from mmpack.schema.rules import Problem


def model_inputs(batch: Batch, model: Any, vision: str = "auto") -> dict[str, Any]:
    """Keyword arguments of a transformers VLM's forward, always with `use_cache=False`.

    A packed batch needs `attach(model)`. A padded one goes either way: attached by `visible_until`, else by
    `attention_mask`; it encodes a medium once for each time it occurs, as frameworks do.
    They are for this model's forward, attached if it is now: any other raises. What depends on weights is made in the
    forward (see `Ids`), so the same inputs may be used again after a step of the optimizer; after it
    `batch.stats["patches_encoded"]` says what the tower really ran.

    Args: `vision`: `always`: a batch without media runs the smallest medium with weight exactly 0. `auto`: that for
    DistributedDataParallel, which waits for every parameter's gradient.
    Raises: ModelError for a model that would ignore the rule, or has not the batch's ids; SchemaError (MM404) for
    missing pixels.
    """
    if vision not in ("auto", "always"):
        raise ArgumentError(f"model_inputs: vision is {vision!r}. Fix: use 'auto' or 'always'")
    if not isinstance(batch, Batch):
        raise ArgumentError(f"model_inputs: {type(batch).__name__} is no batch. Fix: use mp.pack")
    always = vision == "always" or is_parallel(model)
    model = unwrap(model, "model_inputs")
    family = family_of_model_type(model.config.model_type)
    _refuse_other_ids(batch, model.config, family)
    _refuse_other_media(batch, model.config, family)
    attached = is_attached(model)
    inputs: dict[str, Any] = {"use_cache": False}
    if isinstance(batch, PackedBatch):
        if not attached:
            raise ModelError(
                "model_inputs: the model's attention ignores visible_until. "
                "Fix: mmpack.adapters.transformers.attach(model)"
            )
        ids, positions, key = batch.input_ids[None], batch.position_ids[:, None], "visible_until"
    else:
        assert isinstance(batch, PaddedBatch)
        ids, positions = batch.input_ids, batch.position_ids
        key = "visible_until" if attached else "attention_mask"
    inputs["position_ids"] = positions if family.position_rows > 1 else positions[0]
    inputs[key] = getattr(batch, key)
    if attached:
        inputs["attention_plan"] = planned(batch, model)
    else:
        _refuse_missing_kernels(model.config.get_text_config())
    batch.stats["patches_encoded"] = 0
    make: Callable[[], dict[str, Any]] | None = None
    if not batch.media and always:
        _refuse_idle_tower(model, attached)
        make = functools.partial(_with_idle_tower, batch, model, ids)
    elif batch.media and isinstance(batch, PackedBatch) and encodes_apart(model):
        make = functools.partial(_encoded, batch, model)
    elif batch.media:  # the model's forward encodes
        inputs |= _pixel_inputs(batch, family)
    if not attached:
        if make is None:  # nothing here is of this model
            return inputs | {"input_ids": ids}
        expect_ids(model.model)
    return inputs | {"input_ids": Ids(ids, model.model, attached, make or dict)}


def _refuse_idle_tower(model: Any, attached: bool) -> None:
    if not is_sharded(model):
        return
    if not attached:
        raise ModelError(
            "model_inputs: the model is sharded, and its own attention is on. "
            "Fix: mmpack.adapters.transformers.attach(model)"
        )
    if not encodes_apart(model):  # its own forward runs towers at another place than an idle one
        raise ModelError(
            "model_inputs: the model is sharded, the batch has no media, and this transformers encodes them inside. "
            "Fix: transformers 5.19 or newer, or media in every batch"
        )


def _refuse_other_ids(batch: Batch, config: Any, family: Family) -> None:
    """Ids that the model would look up in vain, or read as another thing than the batch means."""
    if not batch.family_of().same_layout(family):
        raise ModelError(
            f"model_inputs: the batch is of {batch.family}, the model of {family.name}. "
            "Fix: wrap the processor of this model"
        )
    if config.image_token_id != family.image_token_id:
        raise ModelError(
            f"model_inputs: the model's image token is {config.image_token_id}, {family.name}'s is "
            f"{family.image_token_id}. Fix: use a checkpoint of this family's vocabulary"
        )
    assert batch.id_range is not None  # set when the batch was made
    low, high = batch.id_range
    size = config.get_text_config().vocab_size
    if low < 0 or high >= size:
        raise ModelError(
            f"model_inputs: the batch has id {low if low < 0 else high}, the model's ids are 0 to {size - 1}. "
            "Fix: wrap the processor of this model, or resize its embeddings"
        )


def _refuse_missing_kernels(text: Any) -> None:
    """An attention that was written into a config is looked for in the forward only."""
    if text._attn_implementation != "flash_attention_2":
        return
    if not (is_flash_attn_2_available() or installed_version("kernels")):
        raise ModelError(
            "model_inputs: the text model's attention is 'flash_attention_2', and neither flash_attn nor kernels of a "
            "fitting version is installed. Fix: model.set_attn_implementation('sdpa'), or attach(model)"
        )


def _refuse_other_media(batch: Batch, config: Any, family: Family) -> None:
    """Media without pixels, pixels cut after packing, and tiles of another size than the tower's, which has one."""
    for m in batch.media:
        if m.pixel_values is None:
            problem = Problem("MM404", m.media_id, "pixel_values", "is missing")
            raise SchemaError([problem], "model_inputs")
        if family.pixel_layout == "tiles" and tuple(m.grid_thw[1:]) != (
            size := _tile(config, family)
        ):
            raise ModelError(
                f"model_inputs: {m.media_id!r:.60} has tiles of {list(m.grid_thw[1:])} patches, "
                f"the model's tower reads {list(size)}. Fix: wrap the processor of this model"
            )
    if batch.media:
        _refuse_cut_pixels(batch, family)


def _refuse_cut_pixels(batch: Batch, family: Family) -> None:
    """Rows of pixels that were cut or added after packing: each medium would read its neighbour's."""
    whole, expected = batch.pixel_values, [patch_offsets(batch.media)[-1], family.patch_dim]
    if whole is None or list(whole.shape) != expected:
        found = "is missing" if whole is None else f"has shape {list(whole.shape)}"
        why = f"{found}, the batch's media need {expected}"
        problem = Problem("MM404", batch.media[0].media_id, "pixel_values", why)
        raise SchemaError([problem], "model_inputs")


def _runs(batch: Batch, family: Family) -> Iterator[tuple[str, list[int]]]:
    """The medium of each placeholder run, in row order, images apart from videos."""
    for modality in family.placeholder_ids:
        runs = [i for i in batch.media_order if batch.media[i].modality == modality]
        if runs:
            yield modality, runs


def _pixel_inputs(batch: Batch, family: Family) -> dict[str, Any]:
    """Pixels of every run, which the model's forward encodes."""
    out: dict[str, Any] = {}
    for modality, runs in _runs(batch, family):
        pixels = _pixels(batch, runs)
        batch.stats["patches_encoded"] += len(pixels)
        out |= _tower_arguments(family, modality, pixels, [batch.media[i].grid_thw for i in runs])
    return out


def _encoded(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Embeddings of every run; the tower is called here, once a medium."""
    family = batch.family_of()
    encoded, embeddings = 0, {}
    for modality, runs in _runs(batch, family):
        media = sorted(set(runs))
        pixels = _pixels(batch, media)
        encoded += len(pixels)
        grids = [batch.media[i].grid_thw for i in media]
        features = _encode(model, modality, _tower_arguments(family, modality, pixels, grids))
        if len(runs) > len(media):
            _repeat(features, batch, media, runs)
        embeddings[modality] = features
    batch.stats["patches_encoded"] = encoded
    return {"mm_encoder_outputs": embeddings}


def _tile(config: Any, family: Family) -> tuple[int, int]:
    """Patches (h, w) of a tile."""
    height, width = config.vision_config.image_size
    return height // family.patch_size, width // family.patch_size


def encodes_apart(model: Any) -> bool:
    """Whether the forward takes embeddings that were made before (transformers from 5.19 on)."""
    return "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters


def _tower_arguments(
    family: Family, modality: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> dict[str, torch.Tensor]:
    """What forward and encoder call `pixels` [patches, patch_dim] of media of these grids."""
    if family.pixel_layout == "tiles":
        return {"pixel_values": tiles_of(pixels, grids[0][1:], family)}
    on_device = torch.tensor(grids, device=pixels.device)
    if modality == "image":
        return {"pixel_values": pixels, "image_grid_thw": on_device}
    return {"pixel_values_videos": pixels, "video_grid_thw": on_device}


def _encode(model: Any, modality: str, arguments: dict[str, torch.Tensor]) -> Any:
    """The tower's output. `pooler_output`: one [tokens, H] a medium, or [tiles, tokens, H] of all; see `_repeat`."""
    core = model.model
    make = core.get_image_features if modality == "image" else core.get_video_features
    return make(**arguments, return_dict=True)


def _repeat(features: Any, batch: PackedBatch, media: list[int], runs: list[int]) -> None:
    """Repeat what was made of `media` for each of the `runs`: embeddings and all deepstack levels."""
    made = features.pooler_output
    if torch.is_tensor(made):  # tiles stacked, of the family's only modality
        features.pooler_output = _gathered(made.flatten(0, 1), batch).view(-1, *made.shape[1:])
        return

    def repeated(pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if len(media) == len(batch.media):
            return (_gathered(torch.cat(tuple(pieces)), batch),)
        return tuple(pieces[media.index(i)] for i in runs)  # beside media of another modality

    features.pooler_output = repeated(made)
    if getattr(features, "deepstack_features", None) is not None:
        features.deepstack_features = [repeated(level) for level in features.deepstack_features]


def _gathered(features: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[P, H] of all media -> [V, H] of all runs; the backward adds a medium's gradients with one rounding."""
    vision = batch.vision_rows.to(features.device)
    return gather_rows(features, vision.features, inverse=vision.inverse)


def _pixels(batch: Batch, media: list[int]) -> torch.Tensor:
    """[patches, patch_dim] of `media`, one after the other."""
    ends = patch_offsets(batch.media)
    whole = batch.pixel_values
    assert whole is not None  # checked by the caller, medium by medium
    if media == list(range(len(batch.media))):
        return whole
    return torch.cat([whole[ends[i] : ends[i + 1]] for i in media])


def _with_idle_tower(batch: Batch, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Token embeddings plus 0 × the tower's output of the smallest image: every rank runs the same collectives."""
    family = batch.family_of()
    tiles = family.pixel_layout == "tiles"
    h, w = _tile(model.config, family) if tiles else (family.spatial_merge_size,) * 2
    embeds = model.get_input_embeddings()(ids)
    pixels = embeds.new_zeros(h * w, family.patch_dim)
    features = _encode(model, "image", _tower_arguments(family, "image", pixels, [(1, h, w)]))
    batch.stats["patches_encoded"] = len(pixels)
    outputs = [*features.pooler_output, *_levels(features)]
    idle = 0 * sum(f.sum() for f in outputs).to(embeds.dtype)
    return {"input_ids": None, "inputs_embeds": embeds + idle}


def _levels(features: Any) -> list[torch.Tensor]:
    """Deepstack features of all levels, if there are any: a tensor a level, or (from 5.19 on) one a medium."""
    levels = getattr(features, "deepstack_features", None) or []
    return [f for level in levels for f in ([level] if torch.is_tensor(level) else level)]
