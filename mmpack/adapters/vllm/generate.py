"""vLLM's render/generate split: what `/render` made, as samples; samples as what `/inference/v1/generate` takes.

Both speak `GenerateRequest`: expanded ids, and of each medium a hash, the range of its placeholders, its processed
pixels. The trainer takes these, so that engine and trainer hold one object and nothing is made twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mmpack.adapters.checks import check_each, check_groups, is_list
from mmpack.adapters.engine_routes import npy_rows
from mmpack.adapters.rendered import MediaStore, RenderedMedia, rendered_sample
from mmpack.adapters.vllm.calls import LOGPROB_KINDS, NO_LOGPROB, check_known
from mmpack.adapters.vllm.engine_inputs import from_samples
from mmpack.adapters.vllm.samples import sample_of
from mmpack.adapters.vllm.versions import features_of, protocol_class, tokens_module
from mmpack.errors import ArgumentError, check_name, kind_of
from mmpack.layout.names import numbered_in_groups
from mmpack.layout.occurrences import occurring_media
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.trajectory.chat import TOKEN


def from_render(
    requests: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    store: MediaStore | None = None,
    images: Sequence[Sequence[Any] | None] | None = None,
) -> list[Sample]:
    """One sample without loss tokens per rendered prompt, called `<group_id>/<k>`.

    Args:
        requests: what `/v1/chat/completions/render` (or another `/render`) answers: GenerateRequests, or their JSON.
        processor: `mp.wrap_processor` of the engine's processor: its settings are recorded.
        group_ids: one per request; by default its request_id.
        store: takes the pixels, and has those of media that came before: requests of `mm_payload="none"`, and items
            that are None. `mp.pack(samples, media=store)` then finds them. None: each sample holds its own.
        images: of each request the pictures that were handed in; media are then known by their content, as
            those of `mp.wrap_processor` are. None: by their processed pixels.

    Raises: MissingExtraError without vLLM; ArgumentError for what is no GenerateRequest, and what `rendered_sample`
    refuses; LayoutError where placeholders, ranges and grids contradict each other.
    """
    _check_list("from_render", requests)
    read = [
        _valid("GenerateRequest", r, f"from_render: requests[{i}]") for i, r in enumerate(requests)
    ]
    return _prompts("from_render", read, processor, group_ids, store, images)


def from_generate(
    requests: Sequence[Any],
    responses: Sequence[Any],
    processor: Processor,
    *,
    logprobs_mode: str = "raw_logprobs",
    group_ids: Sequence[str] | None = None,
    store: MediaStore | None = None,
    images: Sequence[Sequence[Any] | None] | None = None,
    engine: dict[str, Any] | None = None,
) -> list[Sample]:
    """One sample per choice that `/inference/v1/generate` answered; ids, media and lists of kept ids as they came.

    Args:
        requests: GenerateRequests that were posted, or their JSON.
        responses: GenerateTokensResponses (`output_mode="tokens"`), or their JSON, one per request.
        logprobs_mode: the engine's, as in `to_samples`.
        engine: what else is known of the engine; goes to `metadata["engine"]`.
        group_ids, store, images: of `from_render`.

    Raises: what `from_render` and `to_samples` do; ArgumentError for a sampled token without a logprob where
    logprobs were asked for.
    """
    check_name("from_generate", "logprobs_mode", logprobs_mode, LOGPROB_KINDS)
    _check_list("from_generate", requests)
    check_each("from_generate", len(requests), "requests", {"responses": responses})
    where = [f"from_generate: [{i}]" for i in range(len(requests))]
    read = [_valid("GenerateRequest", r, at) for r, at in zip(requests, where, strict=True)]
    answers = [
        _valid("GenerateTokensResponse", r, at) for r, at in zip(responses, where, strict=True)
    ]
    prompts = _prompts("from_generate", read, processor, group_ids, store, images)
    out = []
    for at, request, answer, prompt in zip(where, read, answers, prompts, strict=True):
        usage = getattr(answer, "usage", None)  # since 0.25
        usage = usage and usage.prompt_tokens_details
        output = SimpleNamespace(
            request_id=answer.request_id,
            prompt_token_ids=request.token_ids,
            num_cached_tokens=usage.cached_tokens if usage else None,
        )
        media: dict[str, list[Medium]] = {}
        for medium in occurring_media(prompt):
            media.setdefault(medium.modality, []).append(medium)
        out += [
            sample_of(
                *(at, "", prompt.group_id, output, _completion(choice, at), media, None),
                *(processor, request.sampling_params, logprobs_mode, engine),
            )
            for choice in answer.choices
        ]
    for sample, name in zip(out, numbered_in_groups([s.group_id for s in out]), strict=True):
        sample.sample_id = name
    return out


def to_generate(
    samples: Sequence[Sample],
    sampling: Any,
    *,
    responses: bool = False,
    media: Mapping[str, Any] | None = None,
    sent: set[str] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The JSON that `/inference/v1/generate` takes, one GenerateRequest per sample: its own ids, pixels and ranges.

    Args:
        sampling: SamplingParams, one for all or one per sample.
        responses: with what was sampled, to be scored or continued; False: up to the first loss token.
        media: cache key -> pixels, of samples that hold none: a `MediaStore`.
        sent: hashes of the media that the server has: their pixels are left out, and what is sent is added. Post the
            requests in their order. A server that has dropped one since refuses the request.
        fields: further ones of GenerateRequest: `model`, `cache_salt`, …

    Raises: MissingExtraError without vLLM; SchemaError (MM404) for media without pixels; ArgumentError for a video with
    text between its frames, of which a GenerateRequest cannot say where its placeholders are.
    """
    make = protocol_class("GenerateRequest", "to_generate")
    each = sampling if isinstance(sampling, Sequence) else [sampling] * len(samples)
    check_each("to_generate", len(samples), "samples", {"sampling": each})
    inputs = from_samples(samples, responses, media, engine_hashes=True)
    out = []
    for i, (given, params) in enumerate(zip(inputs, each, strict=True)):
        _refuse_gaps(given, f"to_generate: samples[{i}]")
        if sent is not None:
            _leave_out(given, sent)
        request = make(
            token_ids=given["prompt_token_ids"],
            features=features_of(given, "to_generate"),
            sampling_params=params,
            **fields,
        )
        out.append(request.model_dump(mode="json", exclude_none=True))
    return out


def _prompts(
    what: str,
    requests: Sequence[Any],
    processor: Processor,
    group_ids: Sequence[str] | None,
    store: MediaStore | None,
    images: Sequence[Sequence[Any] | None] | None,
) -> list[Sample]:
    check_each(what, len(requests), "requests", {"group_ids": group_ids, "images": images})
    groups = [r.request_id for r in requests] if group_ids is None else list(group_ids)
    check_groups(what, groups)
    names = numbered_in_groups(groups)
    return [
        rendered_sample(
            f"{what}: requests[{i}]",
            request.token_ids,
            _media(request.features, f"{what}: requests[{i}]"),
            processor,
            store=store,
            images=None if images is None else images[i],
            sample_id=names[i],
            group_id=groups[i],
        )
        for i, request in enumerate(requests)
    ]


def _media(features: Any, where: str) -> RenderedMedia:
    """The media of vLLM's MultiModalFeatures, or of none."""
    if features is None:
        return RenderedMedia()
    decode = tokens_module("mm_serde", where).decode_mm_kwargs_item
    items: dict[str, list[dict[str, Any] | None]] = {}
    for modality, hashes in features.mm_hashes.items():
        encoded = (features.kwargs_data or {}).get(modality) or [None] * len(hashes)
        items[modality] = [
            None if text is None else _decoded(decode, text, where) for text in encoded
        ]
    return RenderedMedia.of(features.mm_hashes, features.mm_placeholders, items)


def _decoded(decode: Any, text: str, where: str) -> dict[str, Any]:
    try:
        return {name: element.data for name, element in decode(text).items()}
    except Exception as error:  # base64's, msgspec's, what a broken tensor raises
        reason = " ".join(str(error).split())[:120]
        raise ArgumentError(
            f"{where}: kwargs_data is not a medium of vLLM's ({type(error).__name__}: {reason}). "
            "Fix: pass features as the server sent them, from a server of the installed version"
        ) from error


def _completion(choice: Any, where: str) -> SimpleNamespace:
    """A choice as the fields of vLLM's CompletionOutput."""
    routes = choice.routed_experts
    # since 0.28, 0.32 and 0.32
    mask, stop_reason, versions = (
        getattr(choice, name, None) for name in ("sampling_mask", "stop_reason", "weight_versions")
    )
    return SimpleNamespace(
        index=choice.index,
        token_ids=choice.token_ids or [],
        logprobs=_logprobs(choice, where),
        sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask),
        routed_experts=None if routes is None else npy_rows(routes, where),
        finish_reason=choice.finish_reason,
        stop_reason=stop_reason,
        weight_versions=versions,
    )


def _logprobs(choice: Any, where: str) -> list[dict[int, SimpleNamespace]] | None:
    if choice.logprobs is None:
        return None
    steps = choice.logprobs.content or []
    if len(steps) != len(choice.token_ids or []):
        raise ArgumentError(
            f"{where}: {len(steps)} logprobs for {len(choice.token_ids or [])} sampled tokens. "
            "Fix: pass the response as the server sent it"
        )
    check_known([step.logprob for step in steps], where)
    return [
        {
            _token_id(entry, where): SimpleNamespace(
                logprob=entry.logprob if entry.logprob > NO_LOGPROB else -math.inf,
                rank=getattr(entry, "rank", None),
            )
            for entry in (step, *step.top_logprobs)
        }
        for step in steps
    ]


def _token_id(entry: Any, where: str) -> int:
    """Of a GenerateLogProb; before 0.32 of the text `token_id:5`, and without a rank."""
    found = None if hasattr(entry, "token_id") else TOKEN.fullmatch(entry.token)
    if found is None and not hasattr(entry, "token_id"):
        raise ArgumentError(
            f"{where}: a logprob is of {entry.token!r:.40}, expected token_id:<id>. "
            "Fix: pass the response as the server sent it"
        )
    return int(found[1]) if found else entry.token_id


def _leave_out(given: Any, sent: set[str]) -> None:
    """Take the media that were sent out of an engine input, and add the others to `sent`."""
    for modality, hashes in given.get("mm_hashes", {}).items():
        items = given["mm_kwargs"][modality]
        for k, digest in enumerate(hashes):
            if digest in sent:
                items[k] = None
            sent.add(digest)


def _refuse_gaps(given: Any, where: str) -> None:
    for places in given.get("mm_placeholders", {}).values():
        if any(place.is_embed is not None for place in places):
            raise ArgumentError(
                f"{where} has a video with text between its frames: a GenerateRequest has only its range, and vLLM "
                "would read all of it as placeholders. Fix: use from_samples, for LLMEngine.add_request"
            )


def _check_list(what: str, requests: Any) -> None:
    if not is_list(requests):
        raise ArgumentError(
            f"{what}: requests is {kind_of(requests)}, expected a list. Fix: pass one GenerateRequest per prompt"
        )


def _valid(name: str, given: Any, where: str) -> Any:
    """`given` as vLLM's own class, which checks it. Raises: ArgumentError."""
    model = protocol_class(name, where)
    if isinstance(given, model):
        return given
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"{where} is {kind_of(given)}, expected a {model.__name__}. Fix: pass the object, or its JSON as a dict"
        )
    try:
        return model.model_validate(dict(given))
    except ValueError as error:  # pydantic's
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"{where} is not a {model.__name__} ({reason}). Fix: pass what vLLM answered"
        ) from error
