"""Media as a processor made them, pixels [patches, patch_dim] and grids [n, 3] in patches, as Medium, and back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import check_each
from mmpack.errors import ArgumentError, LayoutError, needs

with needs("hf", __name__):
    import torch

from mmpack.families import Family
from mmpack.layout.fingerprint import cache_key, content_hash
from mmpack.layout.occurrences import occurring_media
from mmpack.packing.batch import Batch
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats, float_pixels
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

# a processor's names of a modality's pixels and grids, and of a video's seconds per temporal patch
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"


def media_of_inputs(
    inputs: Mapping[str, Any] | None, family: Family, where: str
) -> dict[str, list[Medium]]:
    """The media of one row, by modality and in order, from what a processor made of them.

    A medium is known by its processed pixels: equal pixels of equal grids get one cache key. Without pixels it is known
    by its place.

    Args: `inputs`: pixel_values [patches, patch_dim], image_grid_thw [n, 3], and those of videos, or None.
    Raises: ArgumentError where pixels and grids don't fit.
    """
    out: dict[str, list[Medium]] = {"image": [], "video": []}
    for modality, media in out.items():
        grids = (inputs or {}).get(GRIDS[modality])
        pixels = (inputs or {}).get(PIXELS[modality])
        if grids is None:
            if pixels is not None:
                raise ArgumentError(
                    f"{where} has {PIXELS[modality]} without {GRIDS[modality]}. Fix: pass both"
                )
            continue
        sizes = _sizes(grids, f"{where}: {GRIDS[modality]}")
        patches = [math.prod(grid) for grid in sizes]
        if pixels is not None and len(pixels) != sum(patches):
            raise ArgumentError(
                f"{where} has {len(pixels)} patches of pixels, its grids {sizes} make {sum(patches)} "
                "(dropped_image). Fix: keep each row with its own media"
            )
        parts = (
            [None] * len(sizes) if pixels is None else torch.as_tensor(pixels).cpu().split(patches)
        )
        given = (inputs or {}).get(SECONDS) if modality == "video" else None
        check_each(where, len(sizes), f"{modality} grids", {SECONDS: given})
        for k, (grid, part) in enumerate(zip(sizes, parts, strict=True)):
            seconds = None if given is None else float(given[k])
            media.append(_medium(modality, grid, part, seconds, family, f"{where}/{modality}/{k}"))
    return out


def name_images(
    media: dict[str, list[Medium]], images: Sequence[Any], processor: Processor, where: str
) -> None:
    """Give a row's processed images the content hash, size and cache key of the `images` that they were made of.

    Raises: LayoutError (MM104, MM107) where their numbers differ.
    """
    own = media["image"]
    if len(images) != len(own):
        raise LayoutError(
            f"{where} has {len(images)} images and {len(own)} processed ones (dropped_image). "
            "Fix: keep each row with its own media",
            "MM107" if len(images) > len(own) else "MM104",
        )
    settings = processor.settings["image"]
    for medium, image in zip(own, images, strict=True):
        pixels, known = processor.rgb_pixels(image, where)
        medium.content_hash = content_hash("image", pixels)
        medium.cache_key = cache_key(medium.content_hash, medium.grid_thw, settings)
        medium.media_id = f"image:{medium.content_hash[:16]}"
        for name, value in known.items():
            setattr(medium, name, value)


def inputs_of_media(
    sample: Sample, pixels: Mapping[str, Any] | None = None, stop: int | None = None
) -> dict[str, Any]:
    """pixel_values, grids and seconds of a sample's media, each as often as it occurs, in order; {} without media.

    `pixels`: cache key -> [patches, patch_dim], of media that hold none. `stop`: only media that end at or before this
    token. Raises: SchemaError (MM404).
    """
    out: dict[str, Any] = {}
    order = occurring_media(sample, stop)
    for modality in PIXELS:
        media = [m for m in order if m.modality == modality]
        if not media:
            continue
        found = held_pixels(media, "from_samples", pixels)
        out[PIXELS[modality]] = torch.cat([as_floats(v, modality, sample.processor) for v in found])
        out[GRIDS[modality]] = torch.tensor([m.grid_thw for m in media])
        seconds = [m.second_per_grid_ts for m in media]
        if None not in seconds:  # only videos have them, and not of every family
            out[SECONDS] = torch.tensor(seconds)
    return out


def rest_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What `inputs` hold other than pixels and grids: `inputs_of_media` makes only those again."""
    restored = {*PIXELS.values(), *GRIDS.values()}
    return {k: v for k, v in inputs.items() if k not in restored}


def described_medium(
    modality: str,
    content: str,
    grid: Sequence[Any],
    num_tokens: int,
    settings: Mapping[str, Any],
    known: Mapping[str, Any],
) -> Medium:
    """A medium of processed pixels whose content hash is known: names and cache key follow from it.

    Args: `grid`: (t, h, w) in patches, as the framework's processor returned it. `settings`: of the processor, by
    modality. `known`: further fields of Medium.
    """
    t, h, w = (int(n) for n in grid)
    return Medium(
        **{
            **known,
            "media_id": f"{modality}:{content[:16]}",
            "modality": modality,
            "cache_key": cache_key(content, (t, h, w), settings[modality]),
            "grid_thw": (t, h, w),
            "num_tokens": num_tokens,
            "content_hash": content,
        }
    )


def pixels_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Cache key -> [patches, patch_dim] of a batch's media, where it has any; bytes as floats."""
    if batch.pixel_values is None:
        return {}
    ends = batch.patch_offsets.tolist()
    values = float_pixels(batch).cpu()
    return {m.cache_key: values[a:b] for m, a, b in zip(batch.media, ends, ends[1:], strict=False)}


def _sizes(grids: Any, where: str) -> list[tuple[int, int, int]]:
    """Grids [n, 3], of any device, as numbers."""
    rows = grids.tolist() if hasattr(grids, "tolist") else [list(g) for g in grids]
    if any(not isinstance(row, list) or len(row) != 3 for row in rows):
        raise ArgumentError(
            f"{where} is not [n, 3]. Fix: pass one row per medium, of t, h and w in patches"
        )
    return [(int(t), int(h), int(w)) for t, h, w in rows]


def _medium(
    modality: str,
    grid: tuple[int, int, int],
    pixels: torch.Tensor | None,
    seconds: float | None,
    family: Family,
    at: str,
) -> Medium:
    digest = hashlib.sha256(f"mmpack.processed.1\0{modality}\0{grid}\0".encode())
    if pixels is None:
        digest.update(at.encode())
    else:
        digest.update(f"{pixels.dtype}\0".encode())
        digest.update(pixels.detach().contiguous().view(torch.uint8).numpy().data)
    key = digest.hexdigest()
    return Medium(
        media_id=f"{modality}:{key[:16]}",
        modality=modality,
        cache_key=key,
        grid_thw=grid,
        num_tokens=family.vision_tokens(grid),
        second_per_grid_ts=seconds,
        pixel_values=pixels,
    )
