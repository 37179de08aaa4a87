"""Calls of the vision and the audio tower: what they are given, and what becomes of it, medium by medium.

Pixels are [patches, patch_dim], of media one after the other. Which media share a call: `mmpack.packing.calls`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.transformers.modules import attention_configs, beside_text, tower_of
from mmpack.adapters.transformers.parts import switched
from mmpack.adapters.transformers.tower_attention import LENGTHS, on_their_device
from mmpack.adapters.transformers.unwrap import is_sharded
from mmpack.cache.features import FeatureStore
from mmpack.cache.summed import SummedFeatures
from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ModelError
from mmpack.families import Family
from mmpack.layout.fingerprint import media_name
from mmpack.ops.patches.lines import lines_of
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.calls import NONE, Counts, calls_of, pooled_pieces
from mmpack.packing.media import canvas_of, tiles_of
from mmpack.packing.pixels import float_pixels
from mmpack.schema.media import Medium

Features = FeatureStore | SummedFeatures


def tower_and_projector(model: Any) -> Tower:
    """All modules below the head that are not the text model: the vision tower, and a projector behind it."""
    core = model.model
    modules = tuple(beside_text(core))
    names = tuple(c._attn_implementation for c in attention_configs(*modules))
    # what get_image_features reads, as InternVL's `vision_feature_layer`
    config = tuple(
        (n, repr(v)) for n, v in vars(core.config).items() if n.startswith("vision_feature")
    )
    return Tower(modules, (*names, os.environ.get("MMPACK_TOWER_ATTENTION"), config))


def has_sharded_tower(model: Any) -> bool:
    """Whether FSDP2 or ZeRO-3 spreads parameters of a tower or a projector over ranks."""
    return any(map(is_sharded, beside_text(model.model)))


def media_names(batch: PackedBatch) -> list[str]:
    """What tells the batch's media from those of other batches."""
    return [media_name(m) for m in batch.media]


def kept_or_encoded(
    model: Any,
    batch: PackedBatch,
    media: Sequence[int],
    features: Features | None,
    encode: Callable[[list[int]], list[Levels]],
) -> list[Levels]:
    """Features of the batch's media with these numbers; `encode` makes those that `features` lack, by their places."""
    if features is None:
        return encode(list(range(len(media))))
    names, counts = media_names(batch), [batch.media[i].num_patches for i in media]
    return features.fetch(tower_and_projector(model), [names[i] for i in media], counts, encode)


@dataclass
class Idle:
    """Towers run on the smallest medium for ranks that would wait: `least` times together with the media at hand.

    After a pass `outputs` [tokens, H] are what became of it, `patches` what it cost. `features`: of the smallest image
    and the smallest audio, where their tower ran on them.
    """

    least: Counts
    features: dict[str, Levels] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    patches: int = 0

    def zero(self, like: torch.Tensor) -> torch.Tensor:
        """0, of dtype and device of `like`, with a gradient of 0 to every weight that made the outputs."""
        total = like.new_zeros(())
        if self.outputs:
            total = 0 * torch.stack([x.sum() for x in self.outputs]).sum()
        return total.to(like.dtype)


def encode_media(
    model: Any,
    family: Family,
    media: Sequence[Medium],
    chosen_pixels: Callable[[list[int]], torch.Tensor],
    max_patches: int | None = None,
    idle: Idle | None = None,
) -> list[Levels]:
    """Features of each medium: one call of each tower where it reads all media alike, or chunks within `max_patches`.

    A larger medium runs alone. With gradients, several chunks are checkpointed, each as a whole, where the tower does
    not checkpoint its layers itself: between forward and backward only features are held.

    Args: `chosen_pixels`: indices into `media` -> their pixels [patches, patch_dim]. `idle`: gets what is missing of
    its runs; those of a tower follow its calls, so that all ranks run the towers in one order.
    """
    calls = calls_of(family, media, max_patches)
    idle = Idle(NONE) if idle is None else idle
    missing = {"image": idle.least.vision, "audio": idle.least.audio}
    tower = tower_and_projector(model)
    again = max_patches is not None and len(calls) > 1 and tower.trains and not _checkpoints(tower)
    out: dict[int, Levels] = {}
    for call in calls:
        if call.modality == "audio":
            _idle(model, family, "image", missing, idle)
        encode = functools.partial(
            _encode_chunk,
            model,
            family,
            call.modality,
            [media[i] for i in call.media],
            functools.partial(chosen_pixels, call.media),
        )
        if again:
            on_device = torch.empty(0, device=tower.device)  # whose random state is kept too
            encode = functools.partial(
                checkpoint, _as_now(tower, encode), on_device, use_reentrant=False
            )
        out |= dict(zip(call.media, encode(), strict=True))
        missing["audio" if call.modality == "audio" else "image"] -= call.runs
    for modality in missing:
        _idle(model, family, modality, missing, idle)
    return [out[i] for i in range(len(media))]


def encode_some(
    model: Any,
    batch: Batch,
    media: Sequence[int],
    max_patches: int | None = None,
    idle: Idle | None = None,
) -> list[Levels]:
    """`encode_media` of a batch's media with these numbers, by the batch's pixels."""
    return encode_media(
        model,
        batch.family_of(),
        [batch.media[i] for i in media],
        lambda chosen: float_pixels(batch, [media[i] for i in chosen]),
        max_patches,
        idle,
    )


def _idle(model: Any, family: Family, modality: str, missing: dict[str, int], idle: Idle) -> None:
    """Run the tower of images or of audio on its smallest medium as often as is missing."""
    while missing[modality] > 0:
        missing[modality] -= 1
        if modality == "audio":
            grid = (8, 1, 1)
        elif family.pixel_layout == "tiles":
            grid = (1 + (family.tokens_by_size is not None), *tile_patches(model.config, family))
        else:
            # transformers' Mistral 3 can't take a canvas of one token
            tokens = 2 if family.pixel_layout == "canvas" else 1
            grid = (1, family.spatial_merge_size, tokens * family.spatial_merge_size)
        embedding = model.get_input_embeddings().weight
        # not 0: some towers leave such pictures out
        pixels = torch.ones(family.pixel_shape(grid, modality), device=embedding.device)
        own = _of_tower(pixels, model, family)
        size = (grid[2] * family.patch_size, grid[1] * family.patch_size)
        given = _tower_arguments(family, modality, own, [grid], [size])
        features = _encode(model, modality, given)
        deeper = getattr(features, "deepstack_features", None) or ()
        idle.outputs += [*features.pooler_output, *(x for level in deeper for x in level)]
        audio = modality == "audio"
        idle.features[modality] = (
            (features.last_hidden_state,) if audio else _per_medium(features, [1])[0]
        )
        idle.patches += len(pixels)


def _encode_chunk(
    model: Any,
    family: Family,
    modality: str,
    media: list[Medium],
    pixels: Callable[[], torch.Tensor],
) -> list[Levels]:
    """Features of media, by one call of the tower. `pixels`: made here, so that nothing holds them."""
    grids = [m.grid_thw for m in media]
    if modality == "video" and family.pooled_frames > 1:
        return _encode_pooled(model, family, _of_tower(pixels(), model, family), grids)
    given = _of_tower(pixels(), model, family)
    rows = grids
    if family.video_bounds is not None:  # a tower of pictures, which a video's frames are
        rows = [(1, h, w) for t, h, w in grids for _ in range(t)]
    sizes = [m.size for m in media]
    features = _encode(model, modality, _tower_arguments(family, modality, given, rows, sizes))
    if modality == "audio":
        counts = [family.tokens_of("audio", grid) for grid in grids]
        return [(own,) for own in features.last_hidden_state.split(counts)]
    return _per_medium(features, [t for t, _, _ in grids])


def _of_tower(pixels: torch.Tensor, model: Any, family: Family) -> torch.Tensor:
    """In the tower's dtype, where it does not cast them itself."""
    if family.pixel_layout != "squares" or model is None:
        return pixels
    return pixels.to(next(tower_of(model.model).parameters()).dtype)


def _encode_pooled(
    model: Any, family: Family, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> list[Levels]:
    """Features of videos whose frames the tower averages, by one call for all pieces of as many frames.

    By tower and projector themselves: transformers 5.23's own call takes no pieces of unlike numbers of frames, and
    cuts what it made as if nothing had been averaged.
    """
    pieces = [piece for grid in grids for piece in pooled_pieces(grid, family)]
    rows = pixels.split([math.prod(piece) for piece in pieces])
    project = getattr(model.model, str(family.projector))
    made: dict[int, torch.Tensor] = {}
    for t in sorted({piece[0] for piece in pieces}):
        own = [k for k, piece in enumerate(pieces) if piece[0] == t]
        given = _tower_arguments(
            family, "video", torch.cat([rows[k] for k in own]), [pieces[k] for k in own]
        )
        patches, sizes = on_their_device(model, given).values()
        tower = tower_of(model.model)
        out = project(tower(patches, grid_thw=sizes).pooler_output).squeeze(1)
        counts = [family.vision_tokens(pieces[k]) for k in own]
        made |= dict(zip(own, out.split(counts), strict=True))
    of_each = iter(made[k] for k in range(len(pieces)))
    return [(torch.cat([next(of_each) for _ in pooled_pieces(g, family)]),) for g in grids]


def tile_patches(config: Any, family: Family) -> tuple[int, int]:
    """Patches (h, w) of a tile, the one size that the tower of such a family reads."""
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return height // family.patch_size, width // family.patch_size


def _tower_arguments(
    family: Family,
    modality: str,
    pixels: torch.Tensor,
    grids: list[tuple[int, int, int]],
    handed: Sequence[tuple[int, int] | None] = (),
) -> dict[str, Any]:
    """What forward and encoder call `pixels` [patches, patch_dim] of media with these grids, which are on the CPU.

    `handed`: (width, height) of each before its resize, which some towers read.
    """
    if modality == "audio":
        return _padded_audio(pixels, [frames for frames, _, _ in grids])
    if family.pixel_layout == "tiles":
        tiles = tiles_of(pixels, grids[0][1:], family)
        if family.tokens_by_size is not None:
            return _sized_arguments(tiles, [t for t, _, _ in grids], handed)
        return {"pixel_values": tiles if family.views is None else tiles[None]}
    if family.pixel_layout == "padded":
        return _line_arguments(modality, pixels, grids)
    if family.pixel_layout == "canvas":
        sizes = torch.tensor([(h * family.patch_size, w * family.patch_size) for _, h, w in grids])
        return {"pixel_values": canvas_of(pixels, grids, family), "image_sizes": sizes}
    on_host = torch.tensor(grids)
    if family.pixel_layout == "strip":
        side = family.patch_size
        strip = pixels.view(-1, 3, side, side).permute(1, 2, 0, 3).reshape(1, 3, side, -1)
        sizes = on_host[:, 1:].repeat_interleave(on_host[:, 0], dim=0).to(torch.int32)
        if modality == "image":
            return {"pixel_values": strip, "target_sizes": sizes}
        return {"pixel_values_videos": strip, "target_sizes_videos": sizes}
    if family.pixel_layout == "squares":
        pixels = pixels.view(-1, 3, family.patch_size, family.patch_size)
    if modality == "image":
        return {"pixel_values": pixels, "image_grid_thw": on_host}
    return {"pixel_values_videos": pixels, "video_grid_thw": on_host}


def _sized_arguments(
    tiles: torch.Tensor, counts: list[int], sizes: Sequence[tuple[int, int] | None]
) -> dict[str, torch.Tensor]:
    """[n, most, 3, height, width] of so many tiles of each picture, and its (height, width) before it was resized."""
    if None in sizes:
        raise ModelError(
            f"model_inputs: media[{sizes.index(None)}] has no size, which this model's tower reads. "
            "Fix: make samples with wrap_processor, or set Medium.size to the picture's (width, height)"
        )
    padded = torch.nn.utils.rnn.pad_sequence(tiles.split(counts), batch_first=True)
    return {"pixel_values": padded, "image_sizes": torch.tensor([s[::-1] for s in sizes if s])}


def _padded_audio(features: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """[n, mel_bins, longest] of features [frames, mel_bins] of audio after audio, and the mask [n, longest]."""
    longest = max(lengths)
    padded = torch.nn.utils.rnn.pad_sequence(features.split(lengths), batch_first=True)
    held = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return {
        "input_features": padded.transpose(1, 2),
        "feature_attention_mask": held.to(features.device, torch.int32),
    }


def _line_arguments(
    modality: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """Arguments of a tower of lines: one for each picture or frame."""
    sizes = [(h, w) for t, h, w in grids for _ in range(t)]
    values, places = lines_of(pixels, sizes)
    lengths = {LENGTHS: [h * w for h, w in sizes]}
    if modality == "image":
        return {"pixel_values": values, "image_position_ids": places} | lengths
    frames = torch.tensor([t for t, _, _ in grids])
    videos = {"pixel_values_videos": values, "video_position_ids": places}
    return videos | {"num_frames_per_video": frames} | lengths


def _encode(model: Any, modality: str, arguments: dict[str, Any]) -> Any:
    """The tower's output. `pooler_output`: [tokens, H] per medium, or [tiles, tokens, H] of all."""
    core = model.model
    if modality == "audio":
        return core.get_audio_features(**arguments, return_dict=True)
    make = core.get_image_features if modality == "image" else core.get_video_features
    return make(**on_their_device(model, arguments), return_dict=True)


def _per_medium(features: Any, times: list[int]) -> list[Levels]:
    """The tower's output, by medium; `times`: tiles of each where they are stacked, else frames made one by one."""
    made = features.pooler_output
    if not torch.is_tensor(made) and len(made) < len(times):  # of all tiles together
        made = made[0].unflatten(0, (sum(times), -1))
    if len(made) > len(times) and not torch.is_tensor(made):
        frames = iter(made)
        return [(torch.cat([next(frames) for _ in range(t)]),) for t in times]
    if torch.is_tensor(made):
        return [(tiles.flatten(0, 1),) for tiles in made.split(times)]
    return list(zip(made, *(getattr(features, "deepstack_features", None) or ()), strict=True))


def _checkpoints(tower: Tower) -> bool:
    """Whether layers of the tower are checkpointed already."""
    return any(
        (m.training and getattr(m, "gradient_checkpointing", False)) or "checkpoint_fn" in vars(m)
        for module in tower.modules
        for m in module.modules()
    )


def _as_now(tower: Tower, run: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    """`run` with the tower's attention of now, also when the backward runs it after `detach`."""
    configs = attention_configs(*tower.modules)
    names = [config._attn_implementation for config in configs]

    def run_as_now(_: torch.Tensor) -> Any:
        with switched(configs, names):
            return run()

    return run_as_now
