"""Hashes that name a layout: of processor settings, of a medium's pixels, and the cache key of its embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.schema.media import Medium
from mmpack.schema.plain_json import canonical_json


def fingerprint(processor: dict[str, Any]) -> str:
    """`sha256:<64 hex>` of `processor` as canonical JSON (sorted keys, no spaces)."""
    return "sha256:" + hashlib.sha256(canonical_json(processor).encode()).hexdigest()


def content_hash(modality: str, pixels: np.ndarray) -> str:
    """sha256 hex over modality, size and RGB8 pixels: `pixels` uint8 [h, w, 3], of a video [frames, h, w, 3]."""
    size = "x".join(str(n) for n in pixels.shape[:-1])
    digest = hashlib.sha256(f"{modality}\0{size}\0".encode())
    digest.update(np.ascontiguousarray(pixels, dtype=np.uint8).data)
    return digest.hexdigest()


def audio_hash(samples: np.ndarray, sampling_rate: int) -> str:
    """sha256 hex over modality, number of samples, rate and float32 samples [n]."""
    digest = hashlib.sha256(f"audio\0{len(samples)}x{sampling_rate}\0".encode())
    digest.update(np.ascontiguousarray(samples, dtype="<f4").data)
    return digest.hexdigest()


def response_hash(text: str, ids: np.ndarray | Sequence[int]) -> str:
    """`sha256:<64 hex>` of the text of responses, and `/<16 hex>` of the ids that it is of (`metadata`, by
    RESPONSE_TEXT_KEY). Text may hold lone surrogates.
    """
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}/{ids_mark(ids)}"


def ids_mark(ids: np.ndarray | Sequence[int]) -> str:
    """16 hex digits that name a list of ids."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").data).hexdigest()[:16]


def cache_key(content: str, grid_thw: tuple[int, int, int], settings: dict[str, Any] | None) -> str:
    """sha256 hex: equal keys give equal vision embeddings under one weights version.

    Args: `content`: a content_hash. `grid_thw`: patches. `settings`: the image, video or audio part of `processor`,
    of which `sampling` is left out: how frames were chosen does not matter once they are.
    """
    part = hashlib.sha256(canonical_json(embedding_settings(settings)).encode()).digest()
    grid = np.asarray(grid_thw, dtype="<i8").tobytes()
    return hashlib.sha256(b"mmpack.media.1\0" + bytes.fromhex(content) + grid + part).hexdigest()


def media_name(medium: Medium) -> str:
    """What tells a medium's embeddings from others': its cache key, and what else must not differ."""
    grid = tuple(int(n) for n in medium.grid_thw)
    return f"{medium.cache_key} {medium.modality} {grid} {medium.content_hash}"


def embedding_settings(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The image or video part of `processor` without `sampling`."""
    return None if settings is None else {k: v for k, v in settings.items() if k != "sampling"}
