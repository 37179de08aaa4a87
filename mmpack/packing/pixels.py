"""Pixels [patches, patch_dim] as the tower reads them, where media hold them as bytes (`pixels="uint8"`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from mmpack.errors import ArgumentError
from mmpack.ops.patches.normalize import normalize_bytes
from mmpack.packing.batch import Batch
from mmpack.packing.media import byte_table, patch_offsets
from mmpack.packing.tensors import as_tensor


def float_pixels(
    batch: Batch, media: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[patches, patch_dim] of `media` (numbers; by default all that are no audio), one after the other, on the batch's
    device; of audio alone its features [frames, mel_bins].

    Bytes become what the processor makes of them, bit for bit, rounded to `dtype` once; pixels that are no bytes stay
    as they are. Every medium must have pixels. Raises: ArgumentError for bytes of an unknown normalisation.
    """
    if media is not None and any(batch.media[i].modality == "audio" for i in media):
        features, ends = batch.audio_features, patch_offsets(batch.media, audio=True)
        assert features is not None  # checked by the caller, medium by medium
        return torch.cat([features[ends[i] : ends[i + 1]] for i in media])
    whole = batch.pixel_values
    assert whole is not None  # checked by the caller, medium by medium
    ends = patch_offsets(batch.media)
    seen = [i for i, m in enumerate(batch.media) if m.modality != "audio"]
    media = seen if media is None else media
    if whole.dtype != torch.uint8:
        if list(media) == seen:
            return whole
        return torch.cat([whole[ends[i] : ends[i + 1]] for i in media])
    made = []
    for modality, run in groupby(media, lambda i: batch.media[i].modality):
        if modality not in batch.byte_values:
            raise _unknown(f"{modality}s of the batch")
        numbers = list(run)
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            rows = whole[ends[numbers[0]] : ends[numbers[-1] + 1]]
        else:
            rows = torch.cat([whole[ends[i] : ends[i + 1]] for i in numbers])
        made.append(normalize_bytes(rows, batch.byte_values[modality], dtype))
    return made[0] if len(made) == 1 else torch.cat(made)


def as_floats(pixels: Any, modality: str, settings: Mapping[str, Any] | None) -> torch.Tensor:
    """Pixels of one medium on the CPU, no longer as bytes. `settings`: `Sample.processor`.

    Raises: ArgumentError for bytes of an unknown normalisation.
    """
    tensor = as_tensor(pixels)
    if tensor.dtype != torch.uint8:
        return tensor
    table = byte_table(settings, modality)
    if table is None:
        raise _unknown(f"an {modality}" if modality == "image" else f"a {modality}")
    return normalize_bytes(tensor, table)


def _unknown(whose: str) -> ArgumentError:
    return ArgumentError(
        f"pixels: those of {whose} are uint8, but Sample.processor doesn't say how to rescale and normalise them. "
        "Fix: use samples of wrap_processor(…, pixels='uint8'), or float32 pixels"
    )
