"""vLLM's request outputs as samples.

A sample is made of three objects of vLLM's: the prompt that was handed in (its pictures), the engine input that the
renderer made of it (expanded ids, placeholder ranges, hashes, pixels, grids), and the RequestOutput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.engine_routes import routes_of_rows
from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS, described_medium
from mmpack.adapters.rendered import MediaStore, kept_lists, processed_medium
from mmpack.adapters.row_sample import continued_positions, row_sample
from mmpack.adapters.vllm.calls import LOGPROB_KINDS
from mmpack.errors import ArgumentError, check_name
from mmpack.layout.fingerprint import content_hash
from mmpack.layout.names import SAMPLING_NAMES, numbered_in_groups
from mmpack.processors.videos import Clip
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import PolicyVersion

# ---- what vLLM's cache leaves out of an input -------------------------------------------------------

FIX = "pass store=, with media that came before, or inputs of render_cmpl(prompts, skip_mm_cache=True)"


def items_of(inputs: Sequence[Any]) -> Mapping[str, Any]:
    """Every processed medium that one of the inputs holds, by its hash."""
    return {
        digest: item
        for given in inputs
        for modality, items in given.get("mm_kwargs", {}).items()
        for digest, item in zip(given["mm_hashes"][modality], items, strict=True)
        if whole(modality, item)
    }


def whole(modality: str, item: Any) -> bool:
    """Whether an item has its data. For media seen earlier it is None, or a shared-memory address."""
    return item is not None and GRIDS[modality] in item


def item_of(given: Any, modality: str, k: int, known: Mapping[str, Any], where: str) -> Any:
    """Medium `k` of an engine input, or the one kept under its hash. Raises: ArgumentError where there is none."""
    item = given["mm_kwargs"][modality][k]
    if not whole(modality, item):
        item = known.get(given["mm_hashes"][modality][k])
    if item is None:
        raise ArgumentError(
            f"{where}: {modality} {k} of an input has no pixels: they stayed in vLLM's cache. Fix: {FIX}"
        )
    return item


# ---- kept ids ---------------------------------------------------------------------------------------

PROCESSED = "processed_logprobs"
EVERY_ID = -1  # of SamplingParams.logprobs
TIES = 64  # more ids than top_k are asked for: ids that tie with the last are kept too
# settings that move logits, and the value that leaves them alone: no softmax over the kept ids gives their logprobs
_MOVES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}
# of one sampled token: ids, their logprobs and ranks
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


def kept_ids(
    completion: Any, steps: Sequence[Step] | None, params: Any, logprobs_mode: str, where: str
) -> Ragged | None:
    """A list per token of `completion`, or None where the engine was not asked for them, or nothing was taken out.

    Args: `steps`: the completion's logprobs. `logprobs_mode`: the engine's.

    Raises: ArgumentError where logprobs are raw, so not those of the kept ids; where penalties or biases moved the
    logits; and where more ids may have been kept than were asked for.
    """
    mask = getattr(completion, "sampling_mask", None)  # since 0.28
    if mask is None and not (_filtered(params) and _asked_for_all(params, logprobs_mode)):
        return None
    check_unmoved(params, where)
    if mask is not None:
        kind = {"logprobs": "processed" if logprobs_mode == PROCESSED else "raw"}
        return kept_lists(mask.token_ids, len(completion.token_ids), kind, where)
    return _finite(steps, params, where)


def check_unmoved(params: Any, where: str) -> None:
    """Raise ArgumentError if penalties or biases moved the logits. `params`: SamplingParams."""
    moved = [name for name, off in _MOVES.items() if (getattr(params, name, None) or off) != off]
    if moved:
        raise ArgumentError(
            f"{where} was sampled with {moved[0]}={getattr(params, moved[0])}, so its logprobs are not a "
            f"softmax over its kept ids. Fix: sample without {moved[0]}"
        )


def asked_logprobs(top_k: int, vocabulary: int, every_id: bool) -> int:
    """`SamplingParams.logprobs` from which kept ids can be read.

    Every id, or, where `top_k` bounds them, that many and some that may tie. `every_id`: even then; in 16 bits any
    number of ids may tie.
    """
    bounded = 0 < top_k < vocabulary - TIES and not every_id
    return top_k + TIES if bounded else EVERY_ID


def _filtered(params: Any) -> bool:
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return bool(cut and params.temperature > 0)


def _asked_for_all(params: Any, logprobs_mode: str) -> bool:
    if logprobs_mode != PROCESSED or params.logprobs is None:
        return False
    return bool(params.logprobs == EVERY_ID or params.logprobs > params.top_k > 0)


def _finite(steps: Sequence[Step] | None, params: Any, where: str) -> Ragged:
    """The ids of finite logprobs. They are all if every id was asked for, or if one that is not kept came too."""
    if steps is None:
        return Ragged.empty(0)
    lists = []
    for n, (ids, logprobs, _) in enumerate(steps):
        kept = np.isfinite(logprobs)
        if kept.all() and params.logprobs != EVERY_ID:
            raise ArgumentError(
                f"{where}, token {n}: all of the {params.logprobs} likeliest ids are kept, and more may be. "
                f"Fix: use SamplingParams(logprobs={EVERY_ID})"
            )
        if len(ids) == 1 and params.logprobs == EVERY_ID:
            raise ArgumentError(
                f"{where}, token {n}: every id was asked for and one came, as vLLM's server does before 0.31. "
                f"Fix: use vLLM 0.31, or a top_k and SamplingParams(logprobs=top_k + {TIES})"
            )
        lists.append(np.unique(ids[kept]))
    return Ragged.of(lists)


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
        store: takes the pixels, each medium's once, and has those of media that came before: vLLM's processor cache
            leaves pixels and grid out of an input whose media it has seen, unless it was rendered with
            `skip_mm_cache=True`. None: samples hold them, and each medium must be whole in one of these inputs.

    Raises: ArgumentError for lists of unlike length, for modes that give logits, for media without pixels, and for kept
    ids that do not fit the logprobs.
    """
    check_name("to_samples", "logprobs_mode", logprobs_mode, LOGPROB_KINDS)
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
    known = items_of(inputs)
    sample_ids = iter(
        numbered_in_groups(
            [g for g, output in zip(groups, outputs, strict=True) for _ in output.outputs]
        )
    )
    out = []
    for output, given, own, params, group, place in zip(
        outputs, inputs, handed, per_output, groups, places, strict=True
    ):
        found = _media(given, own, known, processor, store)
        out += [
            sample_of(
                f"to_samples: {name!r:.60}",
                *(name, group, output, completion, found, place),
                *(processor, params, logprobs_mode, engine),
            )
            for completion, name in zip(output.outputs, sample_ids, strict=False)
        ]
    return out


def _media(
    given: Any,
    own: Mapping[str, Any],
    known: Mapping[str, Any],
    processor: Processor,
    store: MediaStore | None,
) -> dict[str, list[Medium]]:
    """The media of an engine input by modality, in order of appearance."""
    out: dict[str, list[Medium]] = {}
    for modality, hashes in given["mm_hashes"].items() if given["type"] == "multimodal" else ():
        handed = own.get(modality)
        handed = handed if isinstance(handed, list) else [handed] * len(hashes)
        for k, digest in enumerate(hashes):
            medium = None if store is None else store.medium(digest)
            if medium is None:
                item = item_of(given, modality, k, known, "to_samples")
                medium = _medium(modality, item, digest, handed[k], processor)
                medium = medium if store is None else store.add(digest, medium)
            out.setdefault(modality, []).append(medium)
    return out


def _medium(modality: str, item: Any, digest: str, handed: Any, processor: Processor) -> Medium:
    if handed is None:
        made = {name: element.data.clone() for name, element in item.items()}  # may lie in a cache
        return processed_medium("to_samples", modality, made, digest, processor.family)
    known: dict[str, Any]
    settings = processor.settings
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


# ---- one completion ---------------------------------------------------------------------------------


def sample_of(
    where: str,
    sample_id: str,
    group_id: str,
    output: Any,
    completion: Any,
    media: dict[str, list[Medium]],
    place: tuple[np.ndarray, int] | None,
    processor: Processor,
    params: Any,
    logprobs_mode: str,
    engine: dict[str, Any] | None,
) -> Sample:
    """A RequestOutput's completion as a sample; `where` is for errors. `media`: of the prompt, by modality, in order.

    Raises: ArgumentError for kept ids that do not fit the logprobs, and for routes of other tokens; LayoutError where
    the prompt's placeholders and its media differ in number.
    """
    response = [int(i) for i in completion.token_ids]
    start = len(output.prompt_token_ids)
    ids = np.array([*output.prompt_token_ids, *response], dtype=np.int64)
    steps = _steps(completion.logprobs)
    logprobs, likeliest = _logprobs(steps, response)
    versions = [
        PolicyVersion(start + span.start, start + span.end, span.version)
        for span in getattr(completion, "weight_versions", None) or ()  # since 0.32
    ]
    finish = completion.finish_reason
    routes = completion.routed_experts
    about = {
        "request_id": output.request_id,
        "index": completion.index,
        "finish_reason": finish,
        "stop_reason": completion.stop_reason,
    }
    return row_sample(
        where,
        ids,
        media,
        np.arange(len(ids)) >= start,
        processor.family,
        response_start=start,
        processor=processor,
        sample_id=sample_id,
        group_id=group_id,
        position_ids=None if place is None else continued_positions(*place, len(ids)),
        rollout_logprobs=logprobs,
        kept_ids=kept_ids(completion, steps, params, logprobs_mode, where),
        sampling={name: getattr(params, name) for name in SAMPLING_NAMES}
        | {"seed": params.seed, "logprobs": LOGPROB_KINDS[logprobs_mode]},
        finish_reason=finish if finish in ("stop", "length", "abort") else None,
        # of an engine with `enable_return_routed_experts=True`
        routed_experts=None if routes is None else routes_of_rows(routes, len(ids), where),
        policy_versions=versions or None,
        prefix_cached_tokens=output.num_cached_tokens,
        metadata={"argmax_ids": likeliest, "engine": {**(engine or {}), **about}},
    )


def _steps(found: Any) -> list[Step] | None:
    """Ids, logprobs and ranks of each step, of dicts of Logprob or of vLLM's FlatLogprobs."""
    if found is None:
        return None
    if hasattr(found, "start_indices"):  # item by item it would make an object of each id
        columns = (found.token_ids, found.logprobs, found.ranks)
        ids, logprobs, ranks = (np.asarray(column) for column in columns)
        bounds = zip(found.start_indices, found.end_indices, strict=True)
        return [(ids[a:b], logprobs[a:b], ranks[a:b]) for a, b in bounds]
    return [
        (
            np.fromiter(step, np.int64, len(step)),
            np.array([of.logprob for of in step.values()]),
            np.array([of.rank for of in step.values()]),
        )
        for step in found
    ]


def _logprobs(
    steps: list[Step] | None, response: list[int]
) -> tuple[np.ndarray | None, list[int | None] | None]:
    """float32 [n] of the sampled ids, and the likeliest id of each step where the engine was asked for it."""
    if steps is None:
        return None, None
    sampled, likeliest = [], []
    for (ids, logprobs, ranks), token in zip(steps, response, strict=True):
        sampled.append(logprobs[np.flatnonzero(ids == token)[0]])
        first = np.flatnonzero(ranks == 1)
        likeliest.append(int(ids[first[0]]) if len(first) else None)
    return np.array(sampled, dtype=np.float32), likeliest
