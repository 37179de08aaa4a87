"""`renderers`, the chat templates that RL frameworks share: what they return as samples, and samples as their prompts.

A renderer has ids, which of them the policy samples, and a sidecar with each picture's hash, placeholders and processed
pixels. All of it is taken as it is. The package itself is not imported, but to make its `MultiModalData`.

Run with renderers 0.1.12.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of, needs, require

with needs("renderers", __name__):
    import torch  # noqa: F401

from mmpack.adapters.checks import check_each, check_groups, is_list
from mmpack.adapters.episodes import reading
from mmpack.adapters.json_values import encode
from mmpack.adapters.processed_media import GRIDS, PIXELS
from mmpack.adapters.rendered import (
    MediaStore,
    RenderedMedia,
    kept_lists,
    rendered_sample,
    token_ids,
)
from mmpack.layout.names import numbered_in_groups
from mmpack.layout.occurrences import occurrences
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats
from mmpack.processors.wrap import Processor
from mmpack.schema.sample import Sample

KEY = "renderers"  # in Sample.metadata
FINISHED = {"stop": "stop", "length": "length", "tool_calls": "tool", "abort": "abort"}
_TAKEN = {
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "completion_logprobs",
    "sampling_mask",
    "multi_modal_data",
    "prompt_attribution",  # of the prompt's tokens alone, which have no loss
}


def to_samples(
    items: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    store: MediaStore | None = None,
    images: Sequence[Sequence[Any] | None] | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[Sample]:
    """What renderers return, as samples called `<group_id>/<k>`.

    Args:
        items: `RenderedTokens` (loss spans are where `sampled_mask` is), `RenderedTrainingSample` (where `loss_mask`
            is), or the dicts of `renderers.client.generate` and `build_trajectory_step` (the completion, where
            `completion_mask` is if there is one). Of a dict, what a Sample has no field for goes to
            `metadata["renderers"]`.
        processor: `mp.wrap_processor` of the renderer's processor: its settings are recorded.
        group_ids: one per item; by default a dict's request_id, else the item's number.
        store: takes the pixels; None: each sample holds its own.
        images: of each item the pictures of its messages; media are then known by their content, as those of
            `mp.wrap_processor` are. None: by their processed pixels.
        sampling: `temperature`, `top_p`, … of the dicts, and `logprobs`: "processed" or "raw".

    `completion_logprobs` that are all 0 are what `build_trajectory_step` fills in, and are not taken. `sampling_mask`
    becomes `kept_ids`.

    Raises: ArgumentError for another thing, masks of another length than the ids, a renderer that does not say what was
    sampled, kept ids with logprobs that are not processed; LayoutError where placeholders and media contradict each
    other.
    """
    if not is_list(items):
        raise ArgumentError(
            f"to_samples: items is {kind_of(items)}, expected a list. Fix: pass one entry per rendered conversation"
        )
    lists = {"group_ids": group_ids, "images": images}
    check_each("to_samples", len(items), "items", lists)
    groups = [_group(item, i) for i, item in enumerate(items)] if group_ids is None else group_ids
    check_groups("to_samples", groups)
    names = numbered_in_groups(groups)
    out = []
    for i, (item, group, name) in enumerate(zip(items, groups, names, strict=True)):
        where = f"to_samples: items[{i}]"
        of_dict = isinstance(item, Mapping)
        with reading(where):
            read = _of_dict if of_dict else _of_tokens
            ids, scored, start, fields = read(item, sampling, where)
            media = _media(item.get("multi_modal_data") if of_dict else item.multi_modal_data)
        sample = rendered_sample(
            where,
            ids,
            media,
            processor,
            scored=scored,
            response_start=start,
            store=store,
            images=None if images is None else images[i],
            sample_id=name,
            group_id=group,
            **fields,
        )
        with reading(where):
            _name_sources(sample, item)
        out.append(sample)
    return out


def from_samples(
    samples: Sequence[Sample],
    *,
    responses: bool = False,
    media: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """`prompt_ids` and `multi_modal_data` of `renderers.client.generate`, one dict per sample.

    Args: `responses`: with what was sampled; False: up to the first loss token. `media`: cache key -> pixels, of
    samples that hold none.

    Raises: MissingExtraError without renderers; SchemaError (MM404) for media without pixels.
    """
    base = require("renderers.base", "renderers", "from_samples")
    out = []
    for sample in samples:
        spans = sample.loss_spans
        stop = len(sample) if responses or not spans else spans[0].start
        sidecar = base.MultiModalData()
        for place in (o for o in occurrences(sample) if o.stop <= stop):
            medium = sample.media[place.media_index]
            [pixels] = held_pixels([medium], "from_samples", media)
            own = {
                PIXELS[medium.modality]: as_floats(
                    pixels, medium.modality, sample.processor
                ).numpy(),
                GRIDS[medium.modality]: np.array([medium.grid_thw]),
            }
            where = base.PlaceholderRange(place.start, place.stop - place.start)
            digest = medium.metadata.get("vllm_hash", medium.cache_key)
            for lists, value in (
                (sidecar.mm_hashes, digest),
                (sidecar.mm_placeholders, where),
                (sidecar.mm_items, own),
            ):
                lists.setdefault(medium.modality, []).append(value)
        out.append(
            {
                "prompt_ids": sample.input_ids[:stop].tolist(),
                "multi_modal_data": None if sidecar.is_empty() else sidecar,
            }
        )
    return out


Read = tuple[np.ndarray, np.ndarray, int, dict[str, Any]]  # ids, scored, response_start, fields


def _of_tokens(item: Any, sampling: Any, where: str) -> Read:
    """RenderedTokens, or RenderedTrainingSample."""
    ids = token_ids(item.token_ids, where)
    name = "loss_mask" if hasattr(item, "loss_mask") else "sampled_mask"
    mask = getattr(item, name)
    if name == "sampled_mask" and not len(mask):
        if "assistant" in item.message_roles:
            raise ArgumentError(
                f"{where} has no sampled_mask: its renderer does not say what the policy sampled. "
                "Fix: use the model's own renderer, or build_training_sample(…, role_to_mask=…)"
            )
        mask = [False] * len(ids)
    scored = _mask(mask, len(ids), f"{where}.{name}")
    return ids, scored, int(np.argmax(scored)) if scored.any() else len(ids), {}


def _of_dict(item: Mapping[str, Any], sampling: dict[str, Any] | None, where: str) -> Read:
    """What `generate` or `build_trajectory_step` returned."""
    if missing := [name for name in ("prompt_ids", "completion_ids") if name not in item]:
        raise ArgumentError(f"{where} has no {missing[0]}. Fix: pass what generate returned")
    prompt = token_ids(item["prompt_ids"], f"{where}.prompt_ids")
    completion = list(item["completion_ids"])
    ids = prompt if not completion else np.concatenate([prompt, token_ids(completion, where)])
    scored = np.arange(len(ids)) >= len(prompt)
    mask = item.get("completion_mask")
    if mask is not None:
        scored[len(prompt) :] = _mask(mask, len(completion), f"{where}.completion_mask")
    rows = scored[len(prompt) :]
    finish = item.get("finish_reason")
    fields: dict[str, Any] = {
        "sampling": sampling,
        "finish_reason": FINISHED.get(str(finish)),
        "metadata": {KEY: encode({k: v for k, v in item.items() if k not in _TAKEN})},
    }
    logprobs = item.get("completion_logprobs")
    if logprobs is not None and any(value != 0 for value in logprobs):
        check_each(where, len(completion), "completion_ids", {"completion_logprobs": logprobs})
        values = np.asarray(logprobs, dtype=np.float32)[rows]
        if not np.isfinite(values).all():
            raise ArgumentError(
                f"{where}: completion_logprobs of sampled tokens are not finite. "
                "Fix: drop the item, or its completion_logprobs"
            )
        fields["rollout_logprobs"] = values
    lists = item.get("sampling_mask")
    if lists is not None:
        fields["kept_ids"] = kept_lists(lists, len(completion), sampling, where)[rows]
    return ids, scored, len(prompt), fields


def _name_sources(sample: Sample, item: Any) -> None:
    """Whose the observations are, where the renderer says which message a token is of: else they close an answer."""
    roles, of = getattr(item, "message_roles", ()), getattr(item, "message_indices", ())
    if not roles:
        return
    kept = []
    for span in sample.observation_spans or ():
        shown = (roles[m] for m in of[span.start : span.stop] if 0 <= m < len(roles))
        if source := next((role for role in shown if role in ("user", "tool")), None):
            kept.append(dataclasses.replace(span, source=source))
    sample.observation_spans = kept or None


def _mask(given: Any, length: int, where: str) -> np.ndarray:
    """bool [length]. Raises: ArgumentError."""
    values = np.asarray(given) if isinstance(given, list | tuple | np.ndarray) else None
    if values is None or values.shape != (length,) or not np.isin(values, (0, 1)).all():
        raise ArgumentError(
            f"{where} is not a mask of {length} tokens. Fix: pass True or False per token"
        )
    return values.astype(bool)


def _media(sidecar: Any) -> RenderedMedia:
    if sidecar is None:
        return RenderedMedia()
    return RenderedMedia.of(sidecar.mm_hashes, sidecar.mm_placeholders, sidecar.mm_items)


def _group(item: Any, number: int) -> str:
    named = item.get("request_id") if isinstance(item, Mapping) else None
    return str(named or number)
