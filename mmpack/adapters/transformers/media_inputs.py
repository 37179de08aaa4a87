"""What becomes of a batch's media in the model's forward: pixels, or features of media that were encoded before it.

Where the forward takes encoded media, each medium is encoded once, and its features are repeated for each of its
placeholder runs. Else its pixels are repeated. Features of audio, which no forward takes, are put among the token
embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmpack.adapters.transformers.modules import audio_tower_of
from mmpack.adapters.transformers.tower import (
    Features,
    Idle,
    _of_tower,
    _tower_arguments,
    encode_media,
    encode_some,
    kept_or_encoded,
    tower_and_projector,
)
from mmpack.cache.summed import SummedFeatures
from mmpack.cache.tower import Levels
from mmpack.errors import ModelError
from mmpack.families import Family
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.packing.calls import NONE, Counts
from mmpack.packing.pixels import float_pixels
from mmpack.schema.media import Medium
from mmpack.schema.spans import MODALITIES


@dataclass
class Encoded(BaseModelOutputWithPooling):
    """What the forward reads of a modality's encoded media."""

    pooler_output: Any = None  # [tokens, H] per run; of tiles one tensor
    deepstack_features: list[tuple[torch.Tensor, ...]] | None = None


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
                f"model_inputs: the forward of {family.name} can't encode videos, since its tower averages "
                "their frames. Fix: use mp.pack, attach, and transformers 5.19 or newer"
            )
        if family.video_bounds is not None:  # frames of videos among the images
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        own, sizes = _of_tower(pixels, model, family), [batch.media[i].size for i in runs]
        made = _tower_arguments(family, modality, own, grids, sizes)
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
    least: Counts = NONE,
) -> dict[str, Any]:
    """Keywords of the forward: features of every placeholder run. Media that `features` lacks are encoded here, once.

    `batch.stats["patches_encoded"]` becomes the patches that the tower ran. `joined`: every weight of a tower that is
    trained gets a gradient, if only 0. `least`: how often each tower runs, the smallest medium included.
    """
    family = batch.family_of()
    ran: list[int] = []
    idle = Idle(least)

    def encode(media: list[int]) -> list[Levels]:
        ran.extend(media)
        return encode_some(model, batch, media, max_patches, idle)

    made = kept_or_encoded(model, batch, range(len(batch.media)), features, encode)
    if joined or idle.outputs:
        one = made[0]
        seen = () if isinstance(features, SummedFeatures) else [batch.media[i] for i in ran]
        made[0] = (one[0] + zero_of(model, joined, idle, one[0], seen), *one[1:])
    batch.stats["patches_encoded"] = sum(batch.media[i].num_patches for i in ran) + idle.patches
    outputs = {
        modality: _repeated(batch, made, runs, family) for modality, runs in _runs(batch, family)
    }
    return encoder_outputs(model, family, ids, outputs)


def encoder_outputs(
    model: Any, family: Family, ids: torch.Tensor, outputs: dict[str, Encoded]
) -> dict[str, Any]:
    """Keywords of the forward for features by modality."""
    heard = outputs.pop("audio", None)
    if family.audio is None:
        return {"mm_encoder_outputs": outputs}
    embeds = _with_audio(model, family, ids, () if heard is None else heard.pooler_output)
    return {"mm_encoder_outputs": outputs, "inputs_embeds": embeds}


def heard_inputs(batch: Batch, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Keyword of the forward, which encodes pictures: token embeddings with the features of every run of audio."""
    family = batch.family_of()
    runs = dict(_runs(batch, family))
    media = sorted(set(runs["audio"]))
    made = encode_some(model, batch, media)
    seen = sum(batch.media[i].num_patches for m, r in runs.items() if m != "audio" for i in r)
    heard = sum(batch.media[i].num_patches for i in media)
    batch.stats["patches_encoded"] = seen + heard
    heard_runs = [made[media.index(i)][0] for i in runs["audio"]]
    return {"inputs_embeds": _with_audio(model, family, ids, heard_runs)}


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


def inputs_without_media(
    batch: Batch,
    model: Any,
    ids: torch.Tensor,
    features: Features | None = None,
    joined: bool = False,
    least: Counts = NONE,
) -> dict[str, Any]:
    """Keywords of the forward of a batch without media: token embeddings plus 0; arguments as in `encoded_inputs`."""
    idle = Idle(least)
    if least != NONE:
        encode_media(model, batch.family_of(), [], lambda _: ids, idle=idle)
    batch.stats["patches_encoded"] = idle.patches
    embeds = model.get_input_embeddings()(ids)
    embeds = embeds + zero_of(model, joined, idle, embeds)
    if isinstance(features, SummedFeatures) and features.trained:
        embeds = embeds + features.nothing().to(embeds)
    return _as_embeds(model, ids, embeds)


def zero_of(
    model: Any, joined: bool, idle: Idle, like: torch.Tensor, seen: Sequence[Medium] = ()
) -> torch.Tensor:
    """0 like `like`, attached to what towers made idly and, if `joined`, to every weight that they train.

    But not to those of a tower that ran, on the media `seen` or idly: reentrant checkpointing makes their gradients in
    a backward of its own, and DistributedDataParallel takes one of each weight.
    """
    zero = idle.zero(like)
    if not joined:
        return zero
    rest = tower_and_projector(model)
    ran = {name == "audio" for name in (*(m.modality for m in seen), *idle.features)}
    if ran:
        ears = audio_tower_of(model.model)
        rest = replace(rest, modules=tuple(m for m in rest.modules if (m is ears) not in ran))
    return zero + rest.zero().to(like.dtype) if rest.trains else zero


def _as_embeds(model: Any, ids: torch.Tensor, embeds: torch.Tensor) -> dict[str, Any]:
    """Keywords of a forward that gets embeddings in place of ids, and what else the text model looks up by ids."""
    out = {"input_ids": None, "inputs_embeds": embeds}
    decoder = model.get_decoder()
    if getattr(decoder.config, "hidden_size_per_layer_input", 0):
        out["per_layer_inputs"] = decoder.get_per_layer_inputs(ids, None)
    return out


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


def _repeated(batch: PackedBatch, made: list[Levels], runs: list[int], family: Family) -> Encoded:
    """Features of the modality whose `runs` these are, once for each: embeddings and all deepstack levels."""
    media = sorted(set(runs))
    levels: list[tuple[torch.Tensor, ...]] = list(zip(*(made[i] for i in media), strict=True))
    if len(runs) > len(media):
        if len(media) == len(batch.media):
            levels = [(_gathered(torch.cat(level), batch),) for level in levels]
        else:  # with media of another modality
            levels = [tuple(level[media.index(i)] for i in runs) for level in levels]
    if family.pixel_layout == "tiles" and family.tokens_by_size is None:
        whole = torch.cat(levels[0])  # which the forward reads as one tensor
        if family.views is not None:  # of [views, tokens, H]
            whole = whole.unflatten(0, (len(runs), -1))
        return Encoded(pooler_output=whole)
    return Encoded(pooler_output=levels[0], deepstack_features=levels[1:] or None)


def _gathered(features: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[P, H] of all media -> [V, H] of all runs; the backward adds a medium's gradients with one rounding."""
    vision = batch.vision_rows.to(features.device)
    return gather_rows(features, vision.features, inverse=vision.inverse)


def token_types(ids: torch.Tensor, family: Family) -> torch.Tensor:
    """Like `ids`: 1 at placeholders of images, 2 at those of videos, 3 at those of audio, 0 elsewhere.

    For forwards that ask for it: models whose media see each other in both directions.
    """
    out = torch.zeros_like(ids)
    for modality, placeholder in family.placeholder_ids.items():
        out += (ids == placeholder) * (1 + MODALITIES.index(modality))
    return out
