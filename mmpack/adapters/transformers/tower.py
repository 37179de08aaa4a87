"""What the vision tower is called with, and what its output becomes in the model's forward.

Pixels are [patches, patch_dim], of media one after the other. Where the forward takes encoded media, each medium is
encoded once, and its features are repeated for each of its placeholder runs. Else its pixels are repeated. Features of
audio, which no forward takes, are put among the token embeddings.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmpack.adapters.transformers.modules import attention_configs, tower_of
from mmpack.adapters.transformers.recompute import switched
from mmpack.adapters.transformers.tower_attention import LENGTHS, on_their_device
from mmpack.cache.features import FeatureStore
from mmpack.cache.summed import SummedFeatures
from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ModelError
from mmpack.families import Family
from mmpack.layout.fingerprint import media_name
from mmpack.ops.patches.lines import lines_of
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.media import canvas_of, tiles_of
from mmpack.packing.pixels import float_pixels
from mmpack.schema.media import Medium

Features = FeatureStore | SummedFeatures


@dataclass
class Encoded(BaseModelOutputWithPooling):
    """What the forward reads of a modality's encoded media."""

    pooler_output: Any = None  # [tokens, H] per run; of tiles one tensor
    deepstack_features: list[tuple[torch.Tensor, ...]] | None = None


def takes_encoded_media(model: Any) -> bool:
    """Whether the forward takes media that were encoded before: `mm_encoder_outputs`, from transformers 5.19 on."""
    return "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters


def tower_and_projector(model: Any) -> Tower:
    """All modules below the head that are not the text model: the vision tower, and a projector behind it."""
    core = model.model
    modules = tuple(m for m in core.children() if m is not core.get_decoder())
    names = tuple(c._attn_implementation for c in attention_configs(*modules))
    # what get_image_features reads, as InternVL's `vision_feature_layer`
    config = tuple(
        (n, repr(v)) for n, v in vars(core.config).items() if n.startswith("vision_feature")
    )
    return Tower(modules, (*names, os.environ.get("MMPACK_TOWER_ATTENTION"), config))


def media_names(batch: PackedBatch) -> list[str]:
    """What tells the batch's media from those of other batches."""
    return [media_name(m) for m in batch.media]


def pixel_inputs(batch: Batch, model: Any = None) -> dict[str, Any]:
    """Keywords of the forward, which encodes a medium once per placeholder run: pixels and grids of every run.

    The batch's media must have pixels. `batch.stats["patches_encoded"]` becomes the patches that the forward encodes.
    """
    family = batch.family_of()
    encoded = 0
    out: dict[str, Any] = {}
    for modality, runs in _runs(batch, family):
        if modality == "audio":  # see `heard_inputs`
            continue
        pixels = float_pixels(batch, runs)
        encoded += len(pixels)
        grids = [batch.media[i].grid_thw for i in runs]
        if modality == "video" and family.pooled_frames > 1:
            raise ModelError(
                f"model_inputs: the forward of {family.name} can't encode videos, whose frames its tower averages. "
                "Fix: mp.pack, attach, and transformers 5.19 or newer"
            )
        if family.video_bounds is not None:  # frames of videos among the images
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        made = _tower_arguments(family, modality, _of_tower(pixels, model, family), grids)
        out |= {name: x.to(pixels.device) for name, x in made.items() if torch.is_tensor(x)}
    batch.stats["patches_encoded"] = encoded
    return out


def encoded_inputs(
    batch: PackedBatch,
    model: Any,
    ids: torch.Tensor,
    features: Features | None = None,
    max_patches: int | None = None,
    joined: bool = False,
) -> dict[str, Any]:
    """Keywords of the forward: features of every placeholder run. Media that `features` lacks are encoded here, once.

    `batch.stats["patches_encoded"]` becomes the patches that the tower ran. `joined`: every weight of a tower that
    `features` trains gets a gradient, if only 0; of a family that hears, every weight of both towers.
    """
    family = batch.family_of()
    ran: list[int] = []

    def encode(media: list[int]) -> list[Levels]:
        ran.extend(media)
        own = [batch.media[i] for i in media]
        return encode_media(
            model,
            family,
            own,
            lambda chosen: float_pixels(batch, [media[i] for i in chosen]),
            max_patches,
        )

    counts = [m.num_patches for m in batch.media]
    everything = list(range(len(batch.media)))
    if features is None:
        made = encode(everything)
    else:
        made = features.fetch(tower_and_projector(model), media_names(batch), counts, encode)
    if joined and isinstance(features, SummedFeatures) and features.trained:
        made[0] = (made[0][0] + features.zero().to(made[0][0].dtype), *made[0][1:])
    batch.stats["patches_encoded"] = sum(counts[i] for i in ran)
    outputs = {
        modality: _repeated(batch, made, runs, family) for modality, runs in _runs(batch, family)
    }
    heard = outputs.pop("audio", None)
    if family.audio is None:
        return {"mm_encoder_outputs": outputs}
    embeds = _with_audio(model, family, ids, () if heard is None else heard.pooler_output)
    if joined and features is None:
        has = {"audio" if batch.media[i].modality == "audio" else "image" for i in ran}
        for modality in {"image", "audio"} - has:
            embeds = embeds + _idle(batch, model, modality, embeds)
    return {"mm_encoder_outputs": outputs, "inputs_embeds": embeds}


def heard_inputs(batch: Batch, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Keyword of the forward, which encodes pictures: token embeddings with the features of every run of audio."""
    family = batch.family_of()
    runs = dict(_runs(batch, family))
    media = sorted(set(runs["audio"]))
    made = encode_media(
        model,
        family,
        [batch.media[i] for i in media],
        lambda chosen: float_pixels(batch, [media[i] for i in chosen]),
    )
    seen = sum(batch.media[i].num_patches for m, r in runs.items() if m != "audio" for i in r)
    heard = sum(batch.media[i].num_patches for i in media)
    batch.stats["patches_encoded"] = seen + heard
    return {
        "inputs_embeds": _with_audio(
            model, family, ids, [made[media.index(i)][0] for i in runs["audio"]]
        )
    }


def _with_audio(
    model: Any, family: Family, ids: torch.Tensor, features: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Token embeddings of ids [..., S], those of audio from `features` [tokens, H] of each run, in order."""
    embeds: torch.Tensor = model.get_input_embeddings()(ids)
    if not len(features):
        return embeds
    assert family.audio is not None
    mine = (ids == family.audio.token_id)[..., None]
    return embeds.masked_scatter(mine, torch.cat(list(features)).to(embeds.dtype))


def joined_inputs(features: SummedFeatures, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Keywords of the forward of a batch without media: token embeddings plus a 0 of every weight of the tower."""
    embeds = model.get_input_embeddings()(ids)
    return _as_embeds(model, ids, embeds + features.zero().to(embeds.dtype))


def idle_tower_inputs(batch: Batch, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Keywords of the forward of a batch without media: token embeddings plus 0 × the towers' output.

    A tower encodes the smallest medium, so that every rank runs the same collectives.
    """
    embeds = model.get_input_embeddings()(ids)
    batch.stats["patches_encoded"] = 0
    modalities = ["image"] if batch.family_of().audio is None else ["image", "audio"]
    for modality in modalities:
        embeds = embeds + _idle(batch, model, modality, embeds)
    return _as_embeds(model, ids, embeds)


def _idle(batch: Batch, model: Any, modality: str, embeds: torch.Tensor) -> torch.Tensor:
    """0, of `embeds`' dtype, made of what the tower makes of the smallest medium.

    `batch.stats["patches_encoded"]` grows by its rows.
    """
    family = batch.family_of()
    if modality == "audio":
        grid = (8, 1, 1)
    elif family.pixel_layout == "tiles":
        grid = (1, *tile_patches(model.config, family))
    else:
        # transformers' Mistral 3 can't take a canvas of one token
        tokens = 2 if family.pixel_layout == "canvas" else 1
        grid = (1, family.spatial_merge_size, tokens * family.spatial_merge_size)
    pixels = embeds.new_zeros(family.pixel_shape(grid, modality))
    own = _of_tower(pixels, model, family)
    features = _encode(model, modality, _tower_arguments(family, modality, own, [grid]))
    batch.stats["patches_encoded"] += len(pixels)
    outputs = [*features.pooler_output, *_levels(features)]
    idle: torch.Tensor = 0 * sum(f.sum() for f in outputs).to(embeds.dtype)
    return idle


def _as_embeds(model: Any, ids: torch.Tensor, embeds: torch.Tensor) -> dict[str, Any]:
    """Keywords of a forward that gets embeddings in place of ids, and what else the text model looks up by ids."""
    out = {"input_ids": None, "inputs_embeds": embeds}
    decoder = model.get_decoder()
    if getattr(decoder.config, "hidden_size_per_layer_input", 0):
        out["per_layer_inputs"] = decoder.get_per_layer_inputs(ids, None)
    return out


def encode_media(
    model: Any,
    family: Family,
    media: Sequence[Medium],
    chosen_pixels: Callable[[list[int]], torch.Tensor],
    max_patches: int | None = None,
) -> list[Levels]:
    """Features of each medium: one call of the tower per modality, or chunks of whole media within `max_patches`.

    A larger medium runs alone. With gradients, several chunks are checkpointed, each as a whole, where the tower does
    not checkpoint its layers itself: between forward and backward only features are held.

    Args: `chosen_pixels`: indices into `media` -> their pixels [patches, patch_dim].
    """
    counts = [m.num_patches for m in media]
    chunks = [
        (modality, chunk)
        for modality in family.placeholder_ids
        for alike in _alike(family, modality, media)
        for chunk in _chunks(alike, counts, max_patches)
    ]
    tower = tower_and_projector(model)
    again = max_patches is not None and len(chunks) > 1 and tower.trains and not _checkpoints(tower)
    out: dict[int, Levels] = {}
    for modality, chunk in chunks:
        encode = functools.partial(
            _encode_chunk,
            model,
            family,
            modality,
            [media[i].grid_thw for i in chunk],
            functools.partial(chosen_pixels, chunk),
        )
        if again:
            on_device = torch.empty(0, device=tower.device)  # whose random state is kept too
            encode = functools.partial(
                checkpoint, _as_now(tower, encode), on_device, use_reentrant=False
            )
        out |= dict(zip(chunk, encode(), strict=True))
    return [out[i] for i in range(len(media))]


def _encode_chunk(
    model: Any,
    family: Family,
    modality: str,
    grids: list[tuple[int, int, int]],
    pixels: Callable[[], torch.Tensor],
) -> list[Levels]:
    """Features of media with these grids, by one call of the tower. `pixels`: made here, so that nothing holds them."""
    if modality == "video" and family.pooled_frames > 1:
        return _encode_pooled(model, family, _of_tower(pixels(), model, family), grids)
    given = _of_tower(pixels(), model, family)
    features = _encode(model, modality, _tower_arguments(family, modality, given, grids))
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
    pieces = [piece for grid in grids for piece in _pooled_pieces(grid, family)]
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
    return [(torch.cat([next(of_each) for _ in _pooled_pieces(g, family)]),) for g in grids]


def _pooled_pieces(grid: tuple[int, int, int], family: Family) -> list[tuple[int, int, int]]:
    """The grid of a video as grids of at most `pooled_frames` frames."""
    t, h, w = grid
    return [(min(family.pooled_frames, t - at), h, w) for at in range(0, t, family.pooled_frames)]


def _alike(family: Family, modality: str, media: Sequence[Medium]) -> list[list[int]]:
    """Numbers of a modality's media, in groups that the tower may read in one call."""
    mine = [i for i, m in enumerate(media) if m.modality == modality]
    if modality != "audio" or family.audio is None or not family.audio.padding_shows:
        return [mine]
    groups: dict[int, list[int]] = {}  # by the length that each is padded to
    for i in mine:
        frames = min(media[i].grid_thw[0], family.audio.chunk_frames)
        groups.setdefault(frames, []).append(i)
    return list(groups.values())


def tile_patches(config: Any, family: Family) -> tuple[int, int]:
    """Patches (h, w) of a tile, the one size that the tower of such a family reads."""
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return height // family.patch_size, width // family.patch_size


def _runs(batch: Batch, family: Family) -> Iterator[tuple[str, list[int]]]:
    """By modality, the medium of each place of one, in row order; where modalities share an id, all as images."""
    if family.video_bounds is not None:
        if batch.media_order:
            yield "image", list(batch.media_order)
        return
    for modality in family.placeholder_ids:
        runs = [i for i in batch.media_order if batch.media[i].modality == modality]
        if runs:
            yield modality, runs


def _chunks(media: list[int], counts: list[int], most: int | None) -> list[list[int]]:
    """Media one after the other, in chunks of at most `most` patches."""
    out: list[list[int]] = []
    held = 0
    for i in media:
        if not out or (most is not None and held + counts[i] > most):
            out.append([])
            held = 0
        out[-1].append(i)
        held += counts[i]
    return out


def _tower_arguments(
    family: Family, modality: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """What forward and encoder call `pixels` [patches, patch_dim] of media with these grids, which are on the CPU."""
    if modality == "audio":
        return _padded_audio(pixels, [frames for frames, _, _ in grids])
    if family.pixel_layout == "tiles":
        return {"pixel_values": tiles_of(pixels, grids[0][1:], family)}
    if family.pixel_layout == "padded":
        return _line_arguments(family, modality, pixels, grids)
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
    family: Family, modality: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """Of a tower of lines: one for each picture or frame."""
    sizes = [(h, w) for t, h, w in grids for _ in range(t)]
    values, places = lines_of(pixels, sizes, family)
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
    if len(made) > len(times) and not torch.is_tensor(made):
        frames = iter(made)
        return [(torch.cat([next(frames) for _ in range(t)]),) for t in times]
    if torch.is_tensor(made):
        return [(tiles.flatten(0, 1),) for tiles in made.split(times)]
    return list(zip(made, *(getattr(features, "deepstack_features", None) or ()), strict=True))


def _repeated(batch: PackedBatch, made: list[Levels], runs: list[int], family: Family) -> Encoded:
    """Features of the modality whose `runs` these are, once for each: embeddings and all deepstack levels."""
    media = sorted(set(runs))
    levels: list[tuple[torch.Tensor, ...]] = list(zip(*(made[i] for i in media), strict=True))
    if len(runs) > len(media):
        if len(media) == len(batch.media):
            levels = [(_gathered(torch.cat(level), batch),) for level in levels]
        else:  # beside media of another modality
            levels = [tuple(level[media.index(i)] for i in runs) for level in levels]
    if family.pixel_layout == "tiles":  # which the forward reads as one tensor
        return Encoded(pooler_output=torch.cat(levels[0]))
    return Encoded(pooler_output=levels[0], deepstack_features=levels[1:] or None)


def _gathered(features: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[P, H] of all media -> [V, H] of all runs; the backward adds a medium's gradients with one rounding."""
    vision = batch.vision_rows.to(features.device)
    return gather_rows(features, vision.features, inverse=vision.inverse)


def _levels(features: Any) -> list[torch.Tensor]:
    """Deepstack features of all levels, if any: one tensor per level, or (from 5.19 on) one per level and medium."""
    levels = getattr(features, "deepstack_features", None) or []
    return [f for level in levels for f in ([level] if torch.is_tensor(level) else level)]


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
