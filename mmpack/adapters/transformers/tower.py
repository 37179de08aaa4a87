"""What the vision tower is called with, and what its output becomes in the model's forward.

Pixels are [patches, patch_dim], of media one after the other. Where the forward takes encoded media, each medium is
encoded once, and its features are repeated for each of its placeholder runs. Else its pixels are repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mmpack.adapters.transformers.tower_attention import on_their_device
from mmpack.families import Family
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.media import tiles_of
from mmpack.packing.pixels import float_pixels


def takes_encoded_media(model: Any) -> bool:
    """Whether the forward takes media that were encoded before: `mm_encoder_outputs`, from transformers 5.19 on."""
    return "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters


def pixel_inputs(batch: Batch) -> dict[str, Any]:
    """Keywords of the forward, which encodes a medium once per placeholder run: pixels and grids of every run.

    The batch's media must have pixels. `batch.stats["patches_encoded"]` becomes the patches that the forward encodes.
    """
    family = batch.family_of()
    encoded = 0
    out: dict[str, Any] = {}
    for modality, runs in _runs(batch, family):
        pixels = float_pixels(batch, runs)
        encoded += len(pixels)
        grids = [batch.media[i].grid_thw for i in runs]
        made = _tower_arguments(family, modality, pixels, grids)
        out |= {name: x.to(pixels.device) for name, x in made.items()}
    batch.stats["patches_encoded"] = encoded
    return out


def encoded_inputs(batch: PackedBatch, model: Any) -> dict[str, Any]:
    """Keyword of the forward: features of every placeholder run. The tower runs here, once per medium.

    `batch.stats["patches_encoded"]` becomes the patches that it encoded.
    """
    family = batch.family_of()
    encoded, features = 0, {}
    for modality, runs in _runs(batch, family):
        media = sorted(set(runs))
        pixels = float_pixels(batch, media)
        encoded += len(pixels)
        grids = [batch.media[i].grid_thw for i in media]
        made = _encode(model, modality, _tower_arguments(family, modality, pixels, grids))
        if len(runs) > len(media):
            _repeat(made, batch, media, runs)
        features[modality] = made
    batch.stats["patches_encoded"] = encoded
    return {"mm_encoder_outputs": features}


def idle_tower_inputs(batch: Batch, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Keywords of the forward of a batch without media: token embeddings plus 0 × the tower's output.

    The tower encodes the smallest image, so that every rank runs the same collectives.
    """
    family = batch.family_of()
    tiles = family.pixel_layout == "tiles"
    h, w = tile_patches(model.config, family) if tiles else (family.spatial_merge_size,) * 2
    embeds = model.get_input_embeddings()(ids)
    pixels = embeds.new_zeros(h * w, family.patch_dim)
    features = _encode(model, "image", _tower_arguments(family, "image", pixels, [(1, h, w)]))
    batch.stats["patches_encoded"] = len(pixels)
    outputs = [*features.pooler_output, *_levels(features)]
    idle = 0 * sum(f.sum() for f in outputs).to(embeds.dtype)
    return {"input_ids": None, "inputs_embeds": embeds + idle}


def tile_patches(config: Any, family: Family) -> tuple[int, int]:
    """Patches (h, w) of a tile, the one size that the tower of such a family reads."""
    height, width = config.vision_config.image_size
    return height // family.patch_size, width // family.patch_size


def _runs(batch: Batch, family: Family) -> Iterator[tuple[str, list[int]]]:
    """By modality, the medium of each placeholder run, in row order."""
    for modality in family.placeholder_ids:
        runs = [i for i in batch.media_order if batch.media[i].modality == modality]
        if runs:
            yield modality, runs


def _tower_arguments(
    family: Family, modality: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> dict[str, torch.Tensor]:
    """What forward and encoder call `pixels` [patches, patch_dim] of media with these grids, which are on the CPU."""
    if family.pixel_layout == "tiles":
        return {"pixel_values": tiles_of(pixels, grids[0][1:], family)}
    on_host = torch.tensor(grids)
    if modality == "image":
        return {"pixel_values": pixels, "image_grid_thw": on_host}
    return {"pixel_values_videos": pixels, "video_grid_thw": on_host}


def _encode(model: Any, modality: str, arguments: dict[str, torch.Tensor]) -> Any:
    """The tower's output. `pooler_output`: [tokens, H] per medium, or [tiles, tokens, H] of all; see `_repeat`."""
    core = model.model
    make = core.get_image_features if modality == "image" else core.get_video_features
    return make(**on_their_device(model, arguments), return_dict=True)


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


def _levels(features: Any) -> list[torch.Tensor]:
    """Deepstack features of all levels, if any: one tensor per level, or (from 5.19 on) one per level and medium."""
    levels = getattr(features, "deepstack_features", None) or []
    return [f for level in levels for f in ([level] if torch.is_tensor(level) else level)]
