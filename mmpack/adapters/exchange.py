"""What adapters of frameworks that hold rows share: one row's ids [L] and processed media as a Sample, and back.

A framework's values that a Sample has no field for go through its metadata: JSON, so that a trace file keeps them.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, SchemaError, needs

with needs("hf", __name__):
    import torch

from mmpack.families import Family
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.layout.occurrences import occurrences
from mmpack.layout.runs import placeholder_runs
from mmpack.packing.batch import Batch
from mmpack.processors.settings import text_hash
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, ObservationSpan

# a processor's names of a modality's pixels and grids
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"


def media_of_inputs(
    inputs: Mapping[str, Any] | None, family: Family, where: str
) -> dict[str, list[Medium]]:
    """The media of one row, by modality and in order, from what a processor made of them.

    Args: `inputs`: pixel_values [patches, patch_dim], image_grid_thw [n, 3], and those of videos, or None. A medium is
    known by its processed pixels: equal ones of equal grids get one cache key. Without pixels it is known by its place.
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


def name_pictures(
    media: dict[str, list[Medium]], pictures: Sequence[Any], processor: Processor, where: str
) -> None:
    """Give a row's images the content hash, size and cache key of the pictures that they were made of."""
    images = media["image"]
    if len(pictures) != len(images):
        raise LayoutError(
            f"{where} has {len(pictures)} pictures and {len(images)} processed ones (dropped_image). "
            "Fix: keep each row with its own media",
            "MM107" if len(pictures) > len(images) else "MM104",
        )
    settings = processor.settings["image"]
    for medium, picture in zip(images, pictures, strict=True):
        pixels, known = processor.rgb_pixels(picture, where)
        medium.content_hash = content_hash("image", pixels)
        medium.cache_key = cache_key(medium.content_hash, medium.grid_thw, settings)
        medium.media_id = f"image:{medium.content_hash[:16]}"
        for name, value in known.items():
            setattr(medium, name, value)


def row_sample(
    where: str,
    input_ids: np.ndarray,
    media: dict[str, list[Medium]],
    scored: np.ndarray,
    family: Family,
    *,
    response_start: int,
    processor: Processor | None = None,
    **fields: Any,
) -> Sample:
    """One row as a Sample: its media at their placeholders, its loss spans where `scored` says so.

    Args:
        input_ids: int [L], no padding.
        media: of `media_of_inputs`.
        scored: bool [L]. What follows `response_start` and is not scored is an observation. A placeholder that is
            scored was sampled by the policy, and stands for no medium: `mp.validate` names it.
        processor: whose settings are recorded.
        fields: further ones of Sample.

    Raises: LayoutError where the number of runs of placeholders and of media differ.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    spans, distinct = _spans(where, np.where(scored, family.pad_token_id, ids), media, family)
    later = np.arange(len(ids)) >= response_start
    metadata = dict(fields.pop("metadata", {}))
    if processor is not None:
        settings = processor.settings
        fields |= {"processor": settings, "processor_fingerprint": fingerprint(settings)}
        if scored.any():
            metadata[RESPONSE_TEXT_KEY] = text_hash(
                processor.tokenizer.decode(ids[scored].tolist())
            )
    loss = [LossSpan(a, b, turn=k) for k, (a, b) in enumerate(true_runs(scored))]
    observed = true_runs(later & ~scored)
    return Sample(
        family=family.name,
        input_ids=ids,
        media=distinct,
        modality_spans=spans,
        loss_spans=loss or [LossSpan(response_start, response_start, turn=0)],
        observation_spans=[
            ObservationSpan(a, b, "environment", sum(s.stop <= a for s in loss))
            for a, b in observed
        ]
        or None,
        attention_mask=np.ones(len(ids), dtype=np.int8),
        metadata=metadata,
        **fields,
    )


def inputs_of_media(
    sample: Sample, pixels: Mapping[str, Any] | None = None, stop: int | None = None
) -> dict[str, Any]:
    """pixel_values, grids and seconds of a sample's media, each as often as it occurs, in order; {} without media.

    `pixels`: cache key -> [patches, patch_dim], of media that hold none. `stop`: only media that end at or before this
    token. Raises: SchemaError (MM404).
    """
    out: dict[str, Any] = {}
    order = [sample.media[m] for _, end, m in occurrences(sample) if stop is None or end <= stop]
    for modality in PIXELS:
        media = [m for m in order if m.modality == modality]
        if not media:
            continue
        found = [
            (pixels or {}).get(m.cache_key) if m.pixel_values is None else m.pixel_values
            for m in media
        ]
        for m, values in zip(media, found, strict=True):
            if values is None:
                raise SchemaError(
                    [Problem("MM404", m.media_id, "pixel_values", "is missing")], "from_samples"
                )
        out[PIXELS[modality]] = torch.cat([torch.as_tensor(v) for v in found])
        out[GRIDS[modality]] = torch.tensor([m.grid_thw for m in media])
        seconds = [m.second_per_grid_ts for m in media]
        if None not in seconds:  # only videos have them, and not of every family
            out[SECONDS] = torch.tensor(seconds)
    return out


def pixels_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Cache key -> [patches, patch_dim] of a batch's media, where it has any."""
    if batch.pixel_values is None:
        return {}
    ends = batch.patch_offsets.tolist()
    values = batch.pixel_values.cpu()
    return {m.cache_key: values[a:b] for m, a, b in zip(batch.media, ends, ends[1:], strict=False)}


def columns_of(batch: Batch, samples: Sequence[Sample]) -> dict[str, list[torch.Tensor]]:
    """A batch's `loss_columns` on the CPU, one [n] for each of its `samples`; ArgumentError for other samples."""
    check_same(batch, samples)
    return {
        name: [x.detach().cpu() for x in batch.unpack_loss(values)]
        for name, values in batch.loss_columns.items()
    }


def check_same(batch: Batch, samples: Sequence[Sample]) -> None:
    """Raises ArgumentError if `samples` are not those of `batch`, in its order."""
    counts = [s.num_loss_tokens for s in samples]
    if [s.sample_id for s in samples] != batch.sample_ids or counts != batch.loss_counts:
        raise ArgumentError(
            "from_batch: samples are not those of the batch. Fix: pass them in its order"
        )


def check_each(where: str, count: int, of: str, lists: Mapping[str, Any]) -> None:
    """Raises ArgumentError if one of `lists`, by name, has not one entry each of `count` things. None is no list."""
    for name, values in lists.items():
        if values is not None and len(values) != count:
            raise ArgumentError(
                f"{where}: {name} has {len(values)} entries for {count} {of}. Fix: one each, in their order"
            )


def response_start(sample: Sample) -> int:
    """Where the prompt of a sample that records no such place ends: at its first loss token or observation."""
    starts = [s.start for s in sample.loss_spans] + [
        s.start for s in sample.observation_spans or () if s.turn
    ]
    return min(starts, default=len(sample))


def true_runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Maximal runs of True in `flags` bool [L], half-open."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def encode(value: Any) -> Any:
    """`value` as JSON has it; arrays and tensors bit for bit. What no JSON can hold (an open picture) stays as it is.

    Such a sample is whole in memory, and `mp.write_trace` names what it can't write.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""  # it has no stride
        kind = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": kind, "shape": list(value.shape), "data": _text(raw)}
    if isinstance(value, np.generic):
        value = np.asarray(value)
        return {"__scalar__": encode(value)}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            items = [encode(v) for v in value.reshape(-1)]
            return {"__objects__": items, "shape": list(value.shape)}
        kind = value.dtype.str
        data = _text(np.ascontiguousarray(value).tobytes())
        return {"__array__": kind, "shape": list(value.shape), "data": data}
    if isinstance(value, bytes):
        return {"__bytes__": _text(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(value)}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: encode(v) for k, v in value.items()}
        return {"__items__": [[encode(k), encode(v)] for k, v in value.items()]}
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value), None):
        case "__tensor__":
            raw = torch.frombuffer(bytearray(_bytes(value["data"]) or b"\0"), dtype=torch.uint8)
            raw = raw[:0] if 0 in value["shape"] else raw
            return raw.view(getattr(torch, value["__tensor__"])).reshape(value["shape"])
        case "__scalar__":
            return decode(value["__scalar__"])[()]
        case "__array__":
            flat = np.frombuffer(_bytes(value["data"]), dtype=np.dtype(value["__array__"]))
            return flat.reshape(value["shape"]).copy()
        case "__objects__":
            out = np.empty(len(value["__objects__"]), dtype=object)
            for i, item in enumerate(value["__objects__"]):
                out[i] = decode(item)
            return out.reshape(value["shape"])
        case "__bytes__":
            return _bytes(value["__bytes__"])
        case "__float__":
            return float(value["__float__"])
        case "__tuple__":
            return tuple(decode(v) for v in value["__tuple__"])
        case "__items__":
            return {decode(k): decode(v) for k, v in value["__items__"]}
    return {k: decode(v) for k, v in value.items()}


def _sizes(grids: Any, where: str) -> list[tuple[int, int, int]]:
    """Grids [n, 3], of any device, as numbers."""
    rows = grids.tolist() if hasattr(grids, "tolist") else [list(g) for g in grids]
    if any(not isinstance(row, list) or len(row) != 3 for row in rows):
        raise ArgumentError(f"{where} is not [n, 3]. Fix: t, h and w in patches, a row each")
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


def _spans(
    where: str, context: np.ndarray, media: dict[str, list[Medium]], family: Family
) -> tuple[list[ModalitySpan], list[Medium]]:
    """The spans of the context's placeholders, and their distinct media in order of appearance."""
    found = placeholder_runs(context, family)
    runs = {
        kind: [
            (int(a), int(b))
            for a, b, video in zip(found.starts, found.stops, found.is_video, strict=True)
            if bool(video) == (kind == "video")
        ]
        for kind in media
    }
    placed: list[tuple[int, int, Medium, int | None]] = []
    for kind, own in media.items():
        counts = [family.spans_of(kind, m.grid_thw) for m in own]
        if sum(counts) != len(runs[kind]):
            raise LayoutError(
                f"{where} has {len(runs[kind])} runs of {kind} placeholders, its {len(own)} {kind} grids need "
                f"{sum(counts)}: a medium was dropped (dropped_image). Fix: keep each row with its own media",
                "MM104" if len(runs[kind]) > sum(counts) else "MM107",
            )
        rest = iter(runs[kind])
        for medium, count in zip(own, counts, strict=True):
            frames = range(count) if count > 1 else [None]
            placed += [(*next(rest), medium, frame) for frame in frames]
    placed.sort(key=lambda item: item[0])
    distinct: dict[tuple[str, float | None], Medium] = {}
    spans = []
    for start, stop, medium, frame in placed:
        key = medium.cache_key, medium.second_per_grid_ts  # which moves positions, not embeddings
        distinct.setdefault(key, medium)
        at = list(distinct).index(key)
        spans.append(ModalitySpan(start, stop, medium.modality, at, frame))
    return spans, list(distinct.values())


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
