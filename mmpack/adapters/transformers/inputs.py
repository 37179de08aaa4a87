"""What goes into `model(**…)` for a batch: T rows (or [B, S]), each medium encoded once where the forward allows it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mmpack.adapters.transformers.attention import is_attached
from mmpack.errors import ArgumentError, ModelError, SchemaError
from mmpack.families import family_of_model_type
from mmpack.pack.batch import Batch, PackedBatch
from mmpack.pack.media import patch_offsets
from mmpack.pack.pad import PaddedBatch
from mmpack.schema.rules import Problem


def model_inputs(batch: Batch, model: Any, vision: str = "auto") -> dict[str, Any]:
    """Keyword arguments of a transformers VLM's forward, always with `use_cache=False`.

    A packed batch needs `attach(model)`. A padded one goes either way: attached by `visible_until`, else by
    `attention_mask`; it encodes a medium once for each time it occurs, as frameworks do.
    `batch.stats["patches_encoded"]` says what the tower really ran.

    Args: `vision`: `auto`, or `always`: a batch without media runs the smallest medium with weight exactly 0.
    Raises: ModelError for a model that would ignore the rule; SchemaError (MM404) for missing pixels.
    """
    if vision not in ("auto", "always"):
        raise ArgumentError(f"model_inputs: vision is {vision!r}. Fix: use 'auto' or 'always'")
    family = family_of_model_type(model.config.model_type)
    if family.name != batch.family:
        raise ModelError(
            f"model_inputs: the batch is of {batch.family}, the model of {family.name}. "
            "Fix: wrap the processor of this model"
        )
    inputs: dict[str, Any] = {"use_cache": False}
    if isinstance(batch, PackedBatch):
        if not is_attached(model):
            raise ModelError(
                "model_inputs: the model's attention ignores visible_until. "
                "Fix: mmpack.adapters.transformers.attach(model)"
            )
        inputs["position_ids"] = batch.position_ids[:, None]
        inputs["visible_until"] = batch.visible_until
        ids = batch.input_ids[None]
    elif isinstance(batch, PaddedBatch):
        inputs["position_ids"] = batch.position_ids
        key = "visible_until" if is_attached(model) else "attention_mask"
        inputs[key] = getattr(batch, key)
        ids = batch.input_ids
    else:
        raise ArgumentError(f"model_inputs: {type(batch).__name__} is no batch. Fix: use mp.pack")
    if len(batch.media) == 0 and vision == "always":
        return inputs | {"inputs_embeds": _with_idle_tower(batch, model, ids)}
    return inputs | {"input_ids": ids} | _vision_inputs(batch, model)


def _vision_inputs(batch: Batch, model: Any) -> dict[str, Any]:
    """Pixels or embeddings of every placeholder run, in row order, images apart from videos."""
    if not batch.media:
        batch.stats["patches_encoded"] = 0
        return {}
    for m in batch.media:
        if m.pixel_values is None:
            problem = Problem("MM404", m.media_id, "pixel_values", "is missing")
            raise SchemaError([problem], "model_inputs")
    once = isinstance(batch, PackedBatch) and encodes_apart(model)
    order = batch.media_order
    out: dict[str, Any] = {}
    embeddings: dict[str, Any] = {}
    encoded = 0
    for modality, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        runs = [i for i in order if batch.media[i].modality == modality]
        if not runs:
            continue
        media = sorted(set(runs)) if once else runs
        pixels, grids = _pixels(batch, media)
        encoded += len(pixels)
        if once:
            features = encode(model, modality, pixels, grids)
            place = {m: k for k, m in enumerate(media)}
            features.pooler_output = tuple(features.pooler_output[place[i]] for i in runs)
            embeddings[modality] = features
        else:
            out |= dict(zip(names, (pixels, grids), strict=True))
    batch.stats["patches_encoded"] = encoded
    return out | ({"mm_encoder_outputs": embeddings} if once else {})


def encodes_apart(model: Any) -> bool:
    """Whether the forward takes embeddings that were made before (transformers from 5.19 on)."""
    return "mm_encoder_outputs" in inspect.signature(_core(model).forward).parameters


def encode(model: Any, modality: str, pixels: torch.Tensor, grids: torch.Tensor) -> Any:
    """The tower's output for `pixels` [patches, patch_dim] of `grids` [n, 3]; `pooler_output`: one [tokens, H] each."""
    core = _core(model)
    make = core.get_image_features if modality == "image" else core.get_video_features
    return make(pixels, grids, return_dict=True)


def _pixels(batch: Batch, media: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    grids = torch.tensor([batch.media[i].grid_thw for i in media], device=batch.device)
    ends = patch_offsets(batch.media)
    whole = batch.pixel_values
    assert whole is not None  # checked by the caller, medium by medium
    if media == list(range(len(batch.media))):
        return whole, grids
    return torch.cat([whole[ends[i] : ends[i + 1]] for i in media]), grids


def _with_idle_tower(batch: Batch, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Token embeddings plus 0 × the tower's output of the smallest image: every rank runs the same collectives."""
    family = batch.family_of()
    merge, temporal = family.spatial_merge_size, family.temporal_patch_size
    embeds = model.get_input_embeddings()(ids)
    pixels = embeds.new_zeros(merge * merge, 3 * temporal * family.patch_size**2)
    grids = torch.tensor([[1, merge, merge]], device=ids.device)
    features = encode(model, "image", pixels, grids)
    batch.stats["patches_encoded"] = len(pixels)
    return embeds + 0 * sum(f.sum() for f in features.pooler_output).to(embeds.dtype)


def _core(model: Any) -> Any:
    """The model without its language-model head."""
    return model.model
