"""vLLM's request outputs as samples, and samples or packed batches as inputs that its engine takes as they are.

A sample is made of three objects of vLLM's: the prompt that was handed in (its pictures), the engine input that the
renderer made of it (expanded ids, placeholder ranges, hashes, pixels, grids), and the RequestOutput. The way back makes
engine inputs again, so that nothing is tokenised, resized or expanded a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS, described_medium, pixels_of
from mmpack.adapters.row_sample import continued_positions
from mmpack.adapters.vllm.cache import item_of, items_of
from mmpack.errors import ArgumentError
from mmpack.layout.fingerprint import content_hash, fingerprint
from mmpack.layout.names import SAMPLING_NAMES, numbered_in_groups
from mmpack.layout.occurrences import Placed, spans_of
from mmpack.packing.batch import PackedBatch
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats
from mmpack.processors.settings import text_hash
from mmpack.processors.videos import Clip
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, PolicyVersion

LOGPROB_KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_FINISHED = {"stop": "stop", "length": "length", "abort": "abort"}
Run = tuple[int, int, Medium]  # start, stop, what the placeholders stand for


def to_samples(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    prompts: Sequence[Any],
    sampling: Any,
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    positions: Sequence[tuple[np.ndarray, int]] | None = None,
    logprobs_mode: str = "raw_logprobs",
    engine: dict[str, Any] | None = None,
    media: Sequence[Mapping[str, Sequence[Any]]] | None = None,
    cached: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """One sample per completion of each RequestOutput.

    Args:
        outputs: what `LLM.generate` returned.
        inputs: what `llm.renderer.render_cmpl(prompts)` made, one per output.
        prompts: dicts with `multi_modal_data`, one per output; content hashes are of what is in them.
        sampling: the SamplingParams, one for all or one per output.
        processor: `wrap_processor` of the engine's own processor: its settings are recorded.
        group_ids: one per output; by default its request_id. Samples are called `<group_id>/<k>`, k counting up.
        positions: int64 [3, P] and rope delta of each prompt, as the engine's model computes them.
        logprobs_mode: the engine's. `raw_logprobs` are of the model, before temperature, top-p and penalties.
        engine: what else is known of the engine; goes to `metadata["engine"]`.
        media: of each output what `VllmEngine.open` returned: videos with their plans, which are recorded. Else a
            video's frames and metadata are taken as `(frames, {"fps": …})` is by `wrap_processor`.
        cached: processed media by vLLM's hash, as `cached_media(llm)` gives them. vLLM's processor cache leaves pixels
            and grid out of an input whose media it has seen, unless it was rendered with `skip_mm_cache=True`. Media
            that another of these inputs holds need not be in it.

    Raises: ArgumentError for lists of unlike length, for modes that give logits, and for media without pixels.
    """
    if logprobs_mode not in LOGPROB_KINDS:
        raise ArgumentError(
            f"to_samples: logprobs_mode {logprobs_mode!r} gives logits, no logprobs. "
            f"Fix: one of {', '.join(LOGPROB_KINDS)}"
        )
    per_output = sampling if isinstance(sampling, Sequence) else [sampling] * len(outputs)
    groups = [o.request_id for o in outputs] if group_ids is None else group_ids
    places = [None] * len(outputs) if positions is None else positions
    handed = [p.get("multi_modal_data") or {} for p in prompts] if media is None else media
    lengths = {len(x) for x in (outputs, inputs, prompts, handed, per_output, groups, places)}
    if len(lengths) > 1:
        raise ArgumentError(
            f"to_samples: {len(outputs)} outputs, {len(inputs)} inputs, {len(prompts)} prompts, "
            f"{len(per_output)} sampling, {len(groups)} groups, {len(places)} positions. Fix: one of each per output"
        )
    known = items_of(inputs, cached or {})
    settings = processor.settings
    kind = LOGPROB_KINDS[logprobs_mode]
    sample_ids = iter(
        numbered_in_groups(
            [g for g, output in zip(groups, outputs, strict=True) for _ in output.outputs]
        )
    )
    out = []
    for output, given, own, params, group, place in zip(
        outputs, inputs, handed, per_output, groups, places, strict=True
    ):
        found, spans = _media(given, own, known, processor, settings)
        out += [
            _sample(
                *(next(sample_ids), group, output, completion, found, spans),
                *(place, settings, params, kind, processor.tokenizer, engine),
            )
            for completion in output.outputs
        ]
    return out


def from_samples(samples: Sequence[Sample], responses: bool = True) -> list[Any]:
    """Engine inputs with the samples' own ids, pixels and placeholder ranges, for `LLMEngine.add_request`.

    `responses`: with what was sampled, to be scored (`prompt_logprobs`) or continued; False: up to the first loss
    token, to be sampled anew. The hash of a medium is its `cache_key`. Pixels are normalised: the engine must not do it
    again (`mm_device_do_normalize=False`).
    Raises: SchemaError (MM404) for media without pixels.
    """
    return [_engine_input(s.input_ids[: _stop(s, responses)], _runs(s, responses)) for s in samples]


def from_batch(batch: PackedBatch, responses: bool = True) -> list[Any]:
    """`from_samples` of a packed batch, shared prefixes included: one engine input per sample, in the batch's order."""
    rows, placeholder_ids = batch.input_ids.shape[0], batch.family_of().placeholder_ids
    medium = np.full(rows, -1)
    begin = np.zeros(rows, dtype=np.int64)
    tokens = batch.input_ids.cpu().numpy()
    for span, index in zip(batch.modality_spans, batch.media_occurrence.tolist(), strict=True):
        medium[span.start : span.stop] = index
        begin[span.start : span.stop] = span.start
        placeholder = placeholder_ids[span.modality]
        text = tokens[span.start : span.stop] != placeholder  # between the frames of a video
        medium[span.start : span.stop][text] = -1
    columns = torch.from_numpy(np.stack([medium, begin], axis=1)).to(batch.device)
    pieces = batch.unpack_tokens(torch.cat([batch.input_ids[:, None], columns], dim=1))
    values = pixels_of(batch)
    media = [dataclasses.replace(m, pixel_values=values.get(m.cache_key)) for m in batch.media]
    ends = [piece.shape[0] for piece in pieces]
    if not responses:
        first = batch.unpack_loss(batch.loss_token_index)
        ends = [int(t[0]) if len(t) else end for t, end in zip(first, ends, strict=True)]
    out = []
    for piece, end in zip(pieces, ends, strict=True):
        ids, of, start = piece[:end].cpu().numpy().T
        cuts = 1 + np.flatnonzero((np.diff(of) != 0) | (np.diff(start) != 0))
        edges = [0, *cuts.tolist(), len(ids)] if len(ids) else []
        runs = [(a, b, media[of[a]]) for a, b in pairwise(edges) if of[a] >= 0]
        out.append(_engine_input(ids, runs))
    return out


def _stop(sample: Sample, responses: bool) -> int:
    return len(sample) if responses or not sample.loss_spans else sample.loss_spans[0].start


def _runs(sample: Sample, responses: bool) -> list[Run]:
    stop = _stop(sample, responses)
    media = [_as_floats(medium, sample) for medium in sample.media]
    return [
        (s.start, s.stop, media[s.media_index]) for s in sample.modality_spans if s.stop <= stop
    ]


def _as_floats(medium: Medium, sample: Sample) -> Medium:
    """The medium as an engine takes it: pixels that are bytes become what its processor makes of them."""
    if medium.pixel_values is None:
        return medium
    pixels = as_floats(medium.pixel_values, medium.modality, sample.processor)
    return dataclasses.replace(medium, pixel_values=pixels)


def _engine_input(ids: np.ndarray, runs: Sequence[Run]) -> Any:
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
        hashes[modality] = [m.cache_key for m in media]
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


def _media(
    given: Any,
    own: Mapping[str, Any],
    known: Mapping[str, Any],
    processor: Processor,
    settings: dict[str, Any],
) -> tuple[list[Medium], list[ModalitySpan]]:
    """The distinct media of an engine input in order of appearance, and the spans of their placeholders."""
    if given["type"] != "multimodal":
        return [], []
    found: list[Placed] = []
    for modality, ranges in given["mm_placeholders"].items():
        handed = own.get(modality)
        handed = handed if isinstance(handed, list) else [handed]
        for k, where in enumerate(ranges):
            item = item_of(given, modality, k, known, "to_samples")
            digest = given["mm_hashes"][modality][k]
            medium = _medium(modality, item, digest, handed[k], processor, settings)
            ranges_of = where.extract_embeds_range()  # inclusive of the last index
            found.append((medium, [(int(a), int(b) + 1) for a, b in ranges_of]))
    found.sort(key=lambda placed: placed[1][0])
    return spans_of(found, processor.family)


def _medium(
    modality: str,
    item: Any,
    digest: str,
    handed: Any,
    processor: Processor,
    settings: dict[str, Any],
) -> Medium:
    known: dict[str, Any]
    if modality == "image":
        pixels, known = processor.rgb_pixels(handed, "to_samples")
        content = content_hash(modality, pixels)
    else:
        clip = handed
        if not isinstance(clip, Clip):
            video = handed if isinstance(handed, tuple) else (handed, {"fps": None})
            clip = processor.clip(video, "to_samples")
        content, known = clip.content_hash, clip.plan.medium_fields() | clip.known
        known[SECONDS] = clip.seconds(float(item[SECONDS].data) if SECONDS in item else None)
    t, h, w = (int(n) for n in item[GRIDS[modality]].data)
    tokens = processor.family.vision_tokens((t, h, w))
    known["metadata"] = known.get("metadata", {}) | {"vllm_hash": digest}
    medium = described_medium(modality, content, (t, h, w), tokens, settings, known)
    medium.pixel_values = _normalised(item[PIXELS[modality]].data, settings[modality])
    return medium


def _normalised(rows: torch.Tensor, part: dict[str, Any]) -> np.ndarray:
    """float32 [patches, patch_dim] as the vision tower reads them; bytes are what `mm_device_do_normalize` left so.

    A copy: `rows` may lie in vLLM's cache.
    """
    if rows.dtype != torch.uint8:
        return rows.float().numpy().copy()
    values = rows.float().unflatten(1, (3, -1))  # a row is channels first
    if part["do_rescale"]:
        values = values * part["rescale_factor"]
    if part["do_normalize"]:
        mean, std = (torch.tensor(part[name])[:, None] for name in ("image_mean", "image_std"))
        values = (values - mean) / std
    return values.flatten(1).numpy()


def _sample(
    sample_id: str,
    group_id: str,
    output: Any,
    completion: Any,
    media: list[Medium],
    spans: list[ModalitySpan],
    place: tuple[np.ndarray, int] | None,
    settings: dict[str, Any],
    params: Any,
    kind: str,
    tokenizer: Any,
    engine: dict[str, Any] | None,
) -> Sample:
    response = [int(i) for i in completion.token_ids]
    start = len(output.prompt_token_ids)
    ids = np.array([*output.prompt_token_ids, *response], dtype=np.int64)
    logprobs, likeliest = _logprobs(completion, response)
    versions = [
        PolicyVersion(start + span.start, start + span.end, span.version)
        for span in completion.weight_versions or ()
    ]
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        family=settings["family"],
        input_ids=ids,
        media=media,
        modality_spans=spans,
        loss_spans=[LossSpan(start, len(ids), turn=0)],
        position_ids=None if place is None else continued_positions(*place, len(ids)),
        attention_mask=np.ones(len(ids), dtype=np.int8),
        processor=settings,
        processor_fingerprint=fingerprint(settings),
        rollout_logprobs=logprobs,
        sampling={name: getattr(params, name) for name in SAMPLING_NAMES}
        | {"seed": params.seed, "logprobs": kind},
        finish_reason=_FINISHED.get(completion.finish_reason),
        policy_versions=versions or None,
        prefix_cached_tokens=output.num_cached_tokens,
        metadata={
            RESPONSE_TEXT_KEY: text_hash(tokenizer.decode(response)),
            "argmax_ids": likeliest,
            "engine": {
                **(engine or {}),
                "request_id": output.request_id,
                "index": completion.index,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            },
        },
    )


def _logprobs(
    completion: Any, response: list[int]
) -> tuple[np.ndarray | None, list[int | None] | None]:
    """float32 [n] of the sampled ids, and the likeliest id of each step where the engine was asked for it."""
    if completion.logprobs is None:
        return None, None
    sampled = [step[i].logprob for step, i in zip(completion.logprobs, response, strict=True)]
    likeliest = [
        next((int(i) for i, found in step.items() if found.rank == 1), None)
        for step in completion.logprobs
    ]
    return np.array(sampled, dtype=np.float32), likeliest
