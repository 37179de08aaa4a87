"""Samples as inputs that vLLM's engine takes as they are.

The way back of `samples`: nothing is tokenised, resized or expanded a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

Run = tuple[int, int, Medium]  # start, stop, what the placeholders stand for


def from_samples(
    samples: Sequence[Sample],
    responses: bool = True,
    media: Mapping[str, Any] | None = None,
    engine_hashes: bool = False,
) -> list[Any]:
    """Engine inputs with the samples' own ids, pixels and placeholder ranges, for `LLMEngine.add_request`.

    Args:
        responses: with what was sampled, to be scored (`prompt_logprobs`) or continued; False: up to the first loss
            token, to be sampled anew.
        media: cache key -> pixels, of samples that hold none.
        engine_hashes: the hash of a medium is the one that vLLM gave it, where it did, and not its `cache_key`.

    Pixels are normalised: the engine must not do it again (`mm_device_do_normalize=False`).
    Raises: SchemaError (MM404) for media without pixels.
    """
    out = []
    for s in samples:
        stop = len(s) if responses or not s.loss_spans else s.loss_spans[0].start
        spans = [span for span in s.modality_spans if span.stop <= stop]
        shown = {
            k: _as_floats(s.media[k], s, media) for k in sorted({x.media_index for x in spans})
        }
        runs = [(x.start, x.stop, shown[x.media_index]) for x in spans]
        out.append(_engine_input(s.input_ids[:stop], runs, engine_hashes))
    return out


def _as_floats(medium: Medium, sample: Sample, store: Mapping[str, Any] | None) -> Medium:
    """The medium as an engine takes it: pixels that are bytes become what its processor makes of them."""
    [found] = held_pixels([medium], "from_samples", store)
    pixels = as_floats(found, medium.modality, sample.processor)
    return dataclasses.replace(medium, pixel_values=pixels)


def _engine_input(ids: np.ndarray, runs: Sequence[Run], engine_hashes: bool) -> Any:
    """vLLM's TokensInput or MultiModalInput. A video of several runs (one per temporal patch) is one item."""
    from transformers import BatchFeature
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    tokens = [int(i) for i in ids]
    if not runs:
        return tokens_input(tokens)
    data: dict[str, Any] = {}
    config: dict[str, Any] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[Any]] = {}
    for modality in GRIDS:
        items = _items([run for run in runs if run[2].modality == modality])
        if not items:
            continue
        media = [medium for _, medium in items]
        pixels = held_pixels(media, "from_samples")
        grids = torch.tensor([m.grid_thw for m in media])
        data[GRIDS[modality]] = grids
        config[GRIDS[modality]] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        data[PIXELS[modality]] = torch.cat([torch.as_tensor(p) for p in pixels])
        config[PIXELS[modality]] = MultiModalFieldConfig.flat_from_sizes(modality, grids.prod(-1))
        seconds = [m.second_per_grid_ts for m in media]
        if None not in seconds:  # only videos have them, and not of every family
            data[SECONDS] = torch.tensor(seconds)
            config[SECONDS] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        own = "vllm_hash" if engine_hashes else ""
        hashes[modality] = [m.metadata.get(own, m.cache_key) for m in media]
        ranges[modality] = [_range(PlaceholderRange, spans) for spans, _ in items]
    kwargs = MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), config)
    return mm_input(tokens, kwargs, hashes, ranges)


def _items(runs: Sequence[Run]) -> list[tuple[list[tuple[int, int]], Medium]]:
    """Runs by the medium that they fill: as many runs as its tokens need belong to one item."""
    out: list[tuple[list[tuple[int, int]], Medium]] = []
    left = 0
    for start, stop, medium in runs:
        if left == 0:
            out.append(([], medium))
            left = medium.num_tokens
        out[-1][0].append((start, stop))
        left -= stop - start
    return out


def _range(make: Any, spans: list[tuple[int, int]]) -> Any:
    offset, length = spans[0][0], spans[-1][1] - spans[0][0]
    if len(spans) == 1:
        return make(offset=offset, length=length)
    filled = torch.zeros(length, dtype=torch.bool)
    for start, stop in spans:
        filled[start - offset : stop - offset] = True
    return make(offset=offset, length=length, is_embed=filled)
