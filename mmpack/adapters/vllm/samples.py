"""vLLM's request outputs as samples.

A sample is made of three objects of vLLM's: the prompt that was handed in (its pictures), the engine input that the
renderer made of it (expanded ids, placeholder ranges, hashes, pixels, grids), and the RequestOutput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS, described_medium
from mmpack.adapters.rendered import MediaStore, processed_medium
from mmpack.adapters.vllm.cache import item_of, items_of
from mmpack.adapters.vllm.completions import LOGPROB_KINDS, sample_of
from mmpack.errors import ArgumentError
from mmpack.layout.fingerprint import content_hash
from mmpack.layout.names import numbered_in_groups
from mmpack.layout.occurrences import Placed, spans_of
from mmpack.processors.videos import Clip
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ModalitySpan


def to_samples(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    prompts: Sequence[Any] | None,
    sampling: Any,
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    positions: Sequence[tuple[np.ndarray, int]] | None = None,
    logprobs_mode: str = "raw_logprobs",
    engine: dict[str, Any] | None = None,
    media: Sequence[Mapping[str, Sequence[Any]]] | None = None,
    cached: Mapping[str, Any] | None = None,
    store: MediaStore | None = None,
) -> list[Sample]:
    """One sample per completion of each RequestOutput; with `routed_experts` where the engine returned them.

    Args:
        outputs: what `LLM.generate` returned.
        inputs: what `llm.renderer.render_cmpl(prompts)` made, one per output.
        prompts: dicts with `multi_modal_data`, one per output; content hashes are of what is in them. None: media are
            known by their processed pixels.
        sampling: the SamplingParams, one for all or one per output.
        processor: `wrap_processor` of the engine's own processor: its settings are recorded.
        group_ids: one per output; by default its request_id. Samples are called `<group_id>/<k>`, k counting up.
        positions: int64 [3, P] and rope delta of each prompt, as the engine's model computes them.
        logprobs_mode: the engine's. `raw_logprobs` are of the model, before temperature, top-p and penalties;
            `processed_logprobs` are over the ids that top-k, top-p and min-p left. These go to `kept_ids`, where the
            engine returns them (`return_sampling_mask=True`), or where the params ask for all that can be left
            (`logprobs=-1`, or more than `top_k`).
        engine: what else is known of the engine; goes to `metadata["engine"]`.
        media: of each output what `VllmEngine.open` returned: videos with their plans, which are recorded. Else a
            video's frames and metadata are taken as `(frames, {"fps": …})` is by `wrap_processor`.
        cached: processed media by vLLM's hash, as `cached_media(llm)` gives them. vLLM's processor cache leaves pixels
            and grid out of an input whose media it has seen, unless it was rendered with `skip_mm_cache=True`. Media
            that another of these inputs holds need not be in it.
        store: takes the pixels, each medium's once, and has those of media that came before. None: samples hold them.

    Raises: ArgumentError for lists of unlike length, for modes that give logits, for media without pixels, and for kept
    ids that do not fit the logprobs.
    """
    if logprobs_mode not in LOGPROB_KINDS:
        raise ArgumentError(
            f"to_samples: logprobs_mode {logprobs_mode!r} returns logits, not logprobs. "
            f"Fix: use one of {', '.join(LOGPROB_KINDS)}"
        )
    per_output = sampling if isinstance(sampling, Sequence) else [sampling] * len(outputs)
    groups = [o.request_id for o in outputs] if group_ids is None else group_ids
    places = [None] * len(outputs) if positions is None else positions
    handed = media
    if handed is None:
        own_media = ((p.get("multi_modal_data") or {}) for p in prompts or ())
        handed = [{}] * len(outputs) if prompts is None else list(own_media)
    lengths = {len(x) for x in (outputs, inputs, handed, per_output, groups, places)}
    if len(lengths | ({len(prompts)} if prompts is not None else set())) > 1:
        raise ArgumentError(
            f"to_samples: {len(outputs)} outputs, {len(inputs)} inputs, {len(handed)} prompts, "
            f"{len(per_output)} sampling, {len(groups)} groups, {len(places)} positions. "
            "Fix: pass one of each per output"
        )
    known = items_of(inputs, cached or {})
    settings = processor.settings
    sample_ids = iter(
        numbered_in_groups(
            [g for g, output in zip(groups, outputs, strict=True) for _ in output.outputs]
        )
    )
    out = []
    for output, given, own, params, group, place in zip(
        outputs, inputs, handed, per_output, groups, places, strict=True
    ):
        found, spans = _media(given, own, known, processor, settings, store)
        out += [
            sample_of(
                f"to_samples: {name!r:.60}",
                *(name, group, output, completion, found, spans),
                *(place, settings, params, logprobs_mode, processor.tokenizer, engine),
            )
            for completion, name in zip(output.outputs, sample_ids, strict=False)
        ]
    return out


def _media(
    given: Any,
    own: Mapping[str, Any],
    known: Mapping[str, Any],
    processor: Processor,
    settings: dict[str, Any],
    store: MediaStore | None,
) -> tuple[list[Medium], list[ModalitySpan]]:
    """The distinct media of an engine input in order of appearance, and the spans of their placeholders."""
    if given["type"] != "multimodal":
        return [], []
    found: list[Placed] = []
    for modality, ranges in given["mm_placeholders"].items():
        handed = own.get(modality)
        handed = handed if isinstance(handed, list) else [handed] * len(ranges)
        for k, where in enumerate(ranges):
            digest = given["mm_hashes"][modality][k]
            medium = None if store is None else store.medium(digest)
            if medium is None:
                item = item_of(given, modality, k, known, "to_samples")
                medium = _medium(modality, item, digest, handed[k], processor, settings)
                medium = medium if store is None else store.add(digest, medium)
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
    if handed is None:
        made = {name: element.data.clone() for name, element in item.items()}  # may lie in a cache
        return processed_medium("to_samples", modality, made, digest, processor.family)
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
