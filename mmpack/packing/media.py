"""The media of a batch: each distinct one once, in order of first use.

`pixel_values` [patches, patch_dim]; `audio_features` [frames, mel_bins].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mmpack.errors import ArgumentError, SchemaError
from mmpack.families import Family
from mmpack.ops.embeddings.merge import VisionRows
from mmpack.packing.tensors import joined, to_read
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.spans import is_placeholder
from mmpack.video.pixel_settings import byte_values


class MediaTable:
    """Distinct media by cache key; `index` maps a key to its place. `store`: cache key -> pixels."""

    def __init__(self, family: Family, store: Mapping[str, Any] | None, what: str):
        if not (store is None or hasattr(store, "get")):
            raise ArgumentError(
                f"{what}: media is {type(store).__name__}, expected pixels by cache key. "
                "Fix: pass {medium.cache_key: pixels}, or leave it out if media hold their own"
            )
        self.media: list[Medium] = []
        self.index: dict[str, int] = {}
        # modality -> float32 [3, 256], where pixels are bytes whose normalisation is known
        self.byte_values: dict[str, torch.Tensor] = {}
        # cache keys of tensors over memory that is not to be written to
        self._lent: set[str] = set()
        self.family = family
        self.store = {} if store is None else store
        self.what = what

    def add(self, medium: Medium, settings: Mapping[str, Any] | None) -> int:
        """The medium's place. Pixels come from the first that has some, else from the store.

        `settings`: `Sample.processor`, which says what bytes stand for. Raises ArgumentError for bytes of one modality
        that stand for different values; SchemaError for pixels that don't fit the grid, and for other pixels under one
        cache key, which are compared where no content hash says that they are the same.
        """
        at = self.index.setdefault(medium.cache_key, len(self.media))
        if at == len(self.media):
            own = object.__new__(type(medium))  # copy.copy takes four times as long
            own.__dict__.update(medium.__dict__, pixel_values=None)
            self.media.append(own)
        known = self.media[at]
        if known.pixel_values is None:
            pixels = _own_or_stored(medium, self.store)
            if pixels is not None:
                known.pixel_values = self._checked(medium, pixels)
                if isinstance(pixels, np.ndarray) and not pixels.flags.writeable:
                    self._lent.add(medium.cache_key)
                if known.pixel_values.dtype == torch.uint8:
                    self._note_bytes(medium, settings)
        elif medium.pixel_values is not None and self._differs(known, medium):
            message = f"has the cache key of {known.media_id!r:.60} but other pixels"
            raise SchemaError(
                [Problem("MM109", medium.media_id, "pixel_values", message)], self.what
            )
        return at

    def stacked(self, pin_memory: bool = False, audio: bool = False) -> torch.Tensor | None:
        """All patches, medium after medium, or all feature frames of audio; None if a medium has none (or there are
        no media).

        Raises ArgumentError where some are bytes and others are not: joined, the bytes would pass for values.
        """
        own = [m for m in self.media if (m.modality == "audio") == audio]
        pixels = [m.pixel_values for m in own]
        if not pixels or any(p is None for p in pixels):
            for medium in own:  # which the batch hands on as they are
                if medium.cache_key in self._lent:
                    medium.pixel_values = medium.pixel_values.clone()
            return None
        odd = next(
            (m for m, p in zip(own, pixels, strict=True) if p.dtype != pixels[0].dtype), None
        )
        if odd is not None and torch.uint8 in (pixels[0].dtype, odd.pixel_values.dtype):
            raise ArgumentError(
                f"{self.what}: {odd.media_id!r:.60} has pixels of {odd.pixel_values.dtype}, "
                f"{own[0].media_id!r:.60} of {pixels[0].dtype}. Fix: make all samples of a batch by one "
                "wrap_processor(…, pixels=…)"
            )
        return torch.cat(pixels) if odd is not None else joined(pixels, pin_memory)

    def _note_bytes(self, medium: Medium, settings: Mapping[str, Any] | None) -> None:
        table = byte_table(settings, medium.modality)
        if table is None:
            return
        first = self.byte_values.setdefault(medium.modality, table)
        if not torch.equal(first, table):
            raise ArgumentError(
                f"{self.what}: {medium.media_id!r:.60} is normalised unlike the {medium.modality}s before it, "
                "and both are uint8. Fix: pack them apart, or use wrap_processor(…, pixels='float32')"
            )

    def _differs(self, known: Medium, medium: Medium) -> bool:
        if known.content_hash is not None and known.content_hash == medium.content_hash:
            return False
        pixels = self._checked(medium, medium.pixel_values)
        same = pixels.data_ptr() == known.pixel_values.data_ptr()
        return not (same or torch.equal(pixels.to(known.pixel_values.dtype), known.pixel_values))

    def _checked(self, medium: Medium, pixels: Any) -> torch.Tensor:
        tensor = to_read(pixels)
        needed = self.family.pixel_shape(medium.grid_thw, medium.modality)
        if tensor.shape != needed:
            message = (
                f"has shape {list(tensor.shape)}, the grid {list(medium.grid_thw)} needs "
                f"{list(needed)}"
            )
            raise SchemaError(
                [Problem("MM404", medium.media_id, "pixel_values", message)], self.what
            )
        return tensor


def byte_table(settings: Mapping[str, Any] | None, modality: str) -> torch.Tensor | None:
    """float32 [3, 256]: what `Sample.processor` makes of the bytes of a modality; None where it doesn't say."""
    part = (settings or {}).get(modality)
    if not isinstance(part, dict) or "backend" not in part:
        return None
    return torch.from_numpy(byte_values(part).copy())


def held_pixels(
    media: Sequence[Medium], what: str, store: Mapping[str, Any] | None = None
) -> list[Any]:
    """The pixels [patches, patch_dim] of each of `media`: its own, else the store's (cache key -> pixels).

    Raises: SchemaError (MM404) for the first medium without any.
    """
    found = [_own_or_stored(m, {} if store is None else store) for m in media]
    for medium, pixels in zip(media, found, strict=True):
        if pixels is None:
            problem = Problem("MM404", medium.media_id, "pixel_values", "is missing")
            raise SchemaError([problem], what)
    return found


def _own_or_stored(medium: Medium, store: Mapping[str, Any]) -> Any:
    """Pixels, or None."""
    if medium.pixel_values is not None:
        return medium.pixel_values
    return store.get(medium.cache_key)


def tiles_of(pixels: torch.Tensor, size: Sequence[int], family: Family) -> torch.Tensor:
    """[tiles, 3, height, width] of patches [tiles·h·w, patch_dim], whose tiles are `size` = (h, w) patches each.

    For families of `pixel_layout` "tiles": a patch is channels, height, width; patches lie row by row.
    """
    h, w, patch = *size, family.patch_size
    cells = pixels.reshape(-1, h, w, 3, patch, patch)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, h * patch, w * patch)


def canvas_of(
    pixels: torch.Tensor, grids: Sequence[tuple[int, int, int]], family: Family
) -> torch.Tensor:
    """[n, 3, height, width] of patches [t·h·w of all, patch_dim], pictures padded with 0 on the right and below.

    For families of `pixel_layout` "canvas"; patches as in `tiles_of`.
    """
    parts = pixels.split([h * w for _, h, w in grids])
    pictures = [tiles_of(p, g[1:], family)[0] for p, g in zip(parts, grids, strict=True)]
    height, width = (max(p.shape[k] for p in pictures) for k in (1, 2))
    return torch.stack([pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pictures])


def patches_of_canvas(
    canvas: torch.Tensor, sizes: Sequence[Sequence[int]], family: Family
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """`canvas_of` backwards: patches of all pictures, and their grids. canvas [n, 3, height, width].

    Args: `sizes`: (height, width) of each picture in pixels, whole patches.
    """
    size, rows, grids = family.patch_size, [], []
    for picture, (height, width) in zip(canvas, sizes, strict=True):
        h, w = height // size, width // size
        cells = picture[:, : h * size, : w * size].reshape(3, h, size, w, size)
        rows.append(cells.permute(1, 3, 0, 2, 4).reshape(h * w, -1))
        grids.append((1, h, w))
    return torch.cat(rows), grids


def patch_offsets(media: Sequence[Medium], audio: bool = False) -> list[int]:
    """[M+1]: patches of medium i are rows [i], [i+1) of the stacked pixels; an audio has none there.

    `audio`: the same of feature frames, of which an audio alone has some.
    """
    out = [0]
    for m in media:
        out.append(out[-1] + (m.num_patches if (m.modality == "audio") == audio else 0))
    return out


def vision_rows(
    ids: np.ndarray,
    family: Family,
    media: Sequence[Medium],
    occurrence: Sequence[int],
    offsets: np.ndarray,
) -> VisionRows:
    """Which feature goes to which row. ids [T]; media [M], that of each occurrence in row order; offsets [M+1].

    A medium's placeholders take its features from the first to the last (frames of a video: with text between; a
    video's sound lies among its placeholders, so each modality is counted by itself).
    """
    rows = np.flatnonzero(is_placeholder(ids, family)).astype(np.int32)
    runs = np.asarray(occurrence, dtype=np.int64)
    counts = np.diff(offsets)[runs]
    before = np.cumsum(counts) - counts
    index = np.repeat((offsets[runs] - before).astype(np.int32), counts)
    index += np.arange(len(rows), dtype=np.int32)
    if family.audio is not None:
        heard = np.array([m.modality == "audio" for m in media], bool)[runs]
        index = _by_hearing(index, ids[rows] == family.audio.token_id, np.repeat(heard, counts))
    source = np.full(len(ids), -1, dtype=np.int32)
    source[rows] = index
    ends = np.cumsum(np.bincount(index, minlength=offsets[-1]))
    rising = (index[1:] >= index[:-1]).all()  # as it is where no medium comes twice
    order = np.arange(len(index), dtype=np.int32) if rising else np.argsort(index, kind="stable")
    parts = (source, rows, index, order, np.concatenate([[0], ends]))
    return VisionRows(*(torch.from_numpy(part.astype(np.int32, copy=False)) for part in parts))


def _by_hearing(index: np.ndarray, is_heard: np.ndarray, heard: np.ndarray) -> np.ndarray:
    """Features `index` [V], in the order of occurrences, in that of rows: those of audio to its rows, each in order.

    `is_heard` [V]: rows of audio; `heard` [V]: features of audio.
    """
    out = np.empty_like(index)
    out[is_heard], out[~is_heard] = index[heard], index[~heard]
    return out
