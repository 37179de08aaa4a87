"""sglang (0.5): responses of its native `/generate` with `return_logprob` as samples, and samples as its requests.

A response is the dict of `/generate` and `Engine.generate`: text, output_ids, meta_info. It holds the engine's expanded
prompt if the request had `return_prompt_token_ids`, or `logprob_start_len=0`; else that is what the processor makes of
the request, checked against `prompt_tokens`. No sglang engine has run with this adapter: its tests build responses from
the package's own classes.

Run with sglang 0.5.23, transformers 5.19.0.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, needs

with needs("hf", __name__):
    import torch  # noqa: F401

from mmpack.adapters.checks import check_each, check_same
from mmpack.adapters.engine_routes import decoded_rows, encoded_rows, routes_of_rows
from mmpack.adapters.json_values import Held, held
from mmpack.adapters.processed_media import GRIDS, inputs_of_media, pixels_of
from mmpack.adapters.row_sample import continued_positions, row_sample
from mmpack.layout.names import SAMPLING_NAMES, numbered_in_groups
from mmpack.packing.batch import Batch
from mmpack.processors.kinds import is_picture
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import PolicyVersion

KEY = "sglang"  # in Sample.metadata
FIRST_PAD_VALUE = 1_000_000  # sglang puts hashes from here on in the place of placeholders
KINDS = ("processed", "raw")
# in meta_info; None in Sample.metadata, where the sample's own say the same
ROUTES = "routed_experts"
OF_ONE_CALL = ("rid", "stream", "text")  # of a request: a new one made of it leaves them out


def to_samples(
    responses: Sequence[Mapping[str, Any]],
    requests: Sequence[Any],
    processor: Processor,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    group_ids: Sequence[str] | None = None,
    positions: Sequence[tuple[np.ndarray, int]] | None = None,
    logprobs: str = "processed",
    config: Any = None,
) -> list[Sample]:
    """One sample per response, called `<group_id>/<k>`.

    Args:
        responses: what `/generate` returned, one dict per sampled response.
        requests: the `GenerateReqInput`, or its fields as a dict, of each response: text or input_ids, image_data
            (Pillow, bytes, base64, a path below the processor's media_root), sampling_params.
        processor: `mp.wrap_processor` of the engine's processor.
        images: of each request, where image_data has none that can be opened here (URLs).
        group_ids: one per response; None: the request's rid, or the response's id.
        positions: int64 [rows, P] and rope delta of each expanded prompt, as sglang computes them; none are recorded
            without.
        logprobs: "processed" or "raw", see `logprob_kind` in docs/traps.md.
        config: transformers' config of the model: it says the shape of `routed_experts`, which requests with
            `return_routed_experts=True` get. Needed for these only.

    Raises: ArgumentError for responses without ids or logprobs, for videos and URLs; LayoutError where the engine's
    prompt and the processor's differ in length, or media and placeholders in number.
    """
    if logprobs not in KINDS:
        raise ArgumentError(
            f"to_samples: logprobs is {logprobs!r}. Fix: use one of {', '.join(KINDS)}"
        )
    if len(responses) != len(requests):
        raise ArgumentError(
            f"to_samples: {len(responses)} responses and {len(requests)} requests. "
            "Fix: pass one request per response, and repeat it where n responses were sampled"
        )
    lists = {"images": images, "group_ids": group_ids, "positions": positions}
    check_each("to_samples", len(responses), "responses", lists)
    for i, response in enumerate(responses):
        if not isinstance(response.get("meta_info"), Mapping):
            raise ArgumentError(
                f"to_samples: responses[{i}] has no meta_info. Fix: pass what the native /generate gave"
            )
    given = [_fields(request) for request in requests]
    if group_ids is None:
        group_ids = [
            str(g.get("rid") or r["meta_info"].get("id", i))
            for i, (r, g) in enumerate(zip(responses, given, strict=True))
        ]
    out = []
    for i, sample_id in enumerate(numbered_in_groups(group_ids)):
        where = f"to_samples: responses[{i}]"
        shown = _images(where, given[i]) if images is None else images[i] or []
        out.append(
            _sample(
                where,
                responses[i],
                given[i],
                [processor.medium(p, where) for p in shown],
                processor,
                logprobs,
                None if positions is None else positions[i],
                config,
                sample_id=sample_id,
                group_id=group_ids[i],
            )
        )
    return out


def from_batch(batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """`from_samples` of a batch's samples, with the batch's pixels: requests that score what was sampled.

    Raises: ArgumentError if `samples` are not those of the batch, in its order.
    """
    check_same(batch, samples)
    return from_samples(samples, responses=True, media=pixels_of(batch))


def from_samples(
    samples: Sequence[Sample],
    responses: bool = False,
    media: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The fields of a `GenerateReqInput` per sample, for `Engine.generate(**request)`.

    Ids are the sample's own, expanded, and images go as what the processor made of them: sglang then tokenises and
    resizes nothing. These are tensors, which JSON does not hold: only requests without images can be the body of
    `/generate` over HTTP.

    Args:
        responses: with what was sampled, to be scored. False: up to the first loss token, with the images there, to be
            sampled once more, with the sampling parameters and fields of the request that the sample came from, except
            rid, stream and n.
        media: cache key -> pixels [patches, patch_dim], of samples that were read from a trace.

    Raises: SchemaError (MM404) for missing pixels.
    """
    out = []
    for s in samples:
        kept = (held(s.metadata, KEY) or {}).get("request", {})
        stop = len(s) if responses or not s.loss_spans else s.loss_spans[0].start
        request = {k: v for k, v in kept.items() if k not in OF_ONE_CALL}
        request |= {"input_ids": s.input_ids[:stop].tolist(), "return_logprob": True}
        inputs = inputs_of_media(s, media, stop)
        if inputs:
            request["image_data"] = [{"format": "processor_output", **inputs}]
        if responses:
            first = s.loss_spans[0].start if s.loss_spans else stop
            request |= {
                "logprob_start_len": first - 1,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            }
        elif "sampling_params" in request:
            params = request["sampling_params"]
            request["sampling_params"] = {k: v for k, v in params.items() if k != "n"}
        elif s.sampling is not None:
            known = {k: v for k, v in s.sampling.items() if k in SAMPLING_NAMES}
            request["sampling_params"] = known
        out.append(request)
    return out


def responses_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The responses that samples of `to_samples` came from, whole. Raises: ArgumentError for samples from elsewhere."""
    out = []
    for s in samples:
        known = held(s.metadata, KEY)
        if known is None:
            raise ArgumentError(
                f"responses_of: {s.sample_id} was not made of an sglang response. "
                "Fix: pass samples that to_samples made"
            )
        response = dict(known["response"])
        start = s.loss_spans[0].start
        response["output_ids"] = s.input_ids[start:].tolist()
        if s.routed_experts is not None and response["meta_info"].get(ROUTES, "") is None:
            routes = encoded_rows(s.routed_experts)
            response["meta_info"] = {**response["meta_info"], ROUTES: routes}
        out.append(response)
    return out


def _sample(
    where: str,
    response: Mapping[str, Any],
    request: dict[str, Any],
    media: list[Medium],
    processor: Processor,
    kind: str,
    place: tuple[np.ndarray, int] | None,
    config: Any,
    **named: Any,
) -> Sample:
    about = response["meta_info"]
    if "output_ids" not in response:
        raise ArgumentError(
            f"{where} has no output_ids, and encoding its text again may not give the sampled ids "
            "(retokenized_response). "
            "Fix: use the native /generate, not the OpenAI endpoint"
        )
    sampled = [int(i) for i in response["output_ids"]]
    prompt = _prompt(where, response, request, media, processor)
    ids = np.concatenate([prompt, np.asarray(sampled, dtype=np.int64)])
    scored = np.arange(len(ids)) >= len(prompt)
    params = request.get("sampling_params") or {}
    finish = about.get("finish_reason") or {}
    versions = [
        PolicyVersion(len(prompt) + v["start"], len(prompt) + v["end"], str(v["version"]))
        for v in about.get("weight_versions", ())
    ]
    if not versions and sampled and about.get("weight_version") is not None:
        versions = [PolicyVersion(len(prompt), len(ids), str(about["weight_version"]))]
    kept = {
        k: v for k, v in request.items() if k not in ("image_data", "input_ids") and v is not None
    }
    routes = _routes(where, about, config, len(ids))
    if routes is not None and encoded_rows(routes) == about[ROUTES]:  # no layer was left out
        response = {**response, "meta_info": {**about, ROUTES: None}}
    return row_sample(
        where,
        ids,
        {"image": media, "video": []},
        scored,
        processor.family,
        response_start=len(prompt),
        processor=processor,
        position_ids=None if place is None else continued_positions(*place, len(ids)),
        rollout_logprobs=_logprobs(where, about, sampled),
        sampling={k: params[k] for k in SAMPLING_NAMES if k in params} | {"logprobs": kind},
        routed_experts=routes,
        finish_reason=finish.get("type")
        if finish.get("type") in ("stop", "length", "abort")
        else None,
        policy_versions=versions or None,
        prefix_cached_tokens=about.get("cached_tokens"),
        metadata={
            KEY: Held(
                {
                    "request": kept,
                    "response": {k: v for k, v in response.items() if k != "output_ids"},
                }
            )
        },
        **named,
    )


def _prompt(
    where: str,
    response: Mapping[str, Any],
    request: dict[str, Any],
    media: list[Medium],
    processor: Processor,
) -> np.ndarray:
    """int64 [P]: the expanded prompt, as the engine records it, else as the processor makes it."""
    about = response["meta_info"]
    scored = about.get("input_token_logprobs") or []
    recorded = response.get("prompt_token_ids")
    if recorded is None and scored and len(scored) == about.get("prompt_tokens"):
        recorded = [entry[1] for entry in scored]
    if recorded is not None:
        ids = np.asarray(recorded, dtype=np.int64)
        return np.where(ids >= FIRST_PAD_VALUE, processor.family.placeholder_ids["image"], ids)
    given = request.get("input_ids")
    if given is None:
        text = request.get("text")
        if text is None:
            raise ArgumentError(
                f"{where}: its request has neither input_ids nor text. Fix: pass the whole request"
            )
        given = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = np.asarray(given, dtype=np.int64)
    single = int((ids == processor.family.image_token_id).sum()) == len(media)
    made = processor.from_ids(ids, media, not single, (), sample_id=where).input_ids
    seen = about.get("prompt_tokens")
    if seen is not None and seen != len(made):
        why = (
            "expanded twice (double_expansion)"
            if seen > len(made)
            else "not expanded (not_expanded)"
        )
        raise LayoutError(
            f"{where}: the engine saw {seen} prompt tokens, the processor makes {len(made)}: {why}, or pixel bounds "
            "differ (max_pixels). Fix: set return_prompt_token_ids=True in the request, then mp.compare both sides",
            "MM101",
        )
    return made


def _logprobs(where: str, about: Mapping[str, Any], sampled: list[int]) -> np.ndarray | None:
    """float32 [n] of the sampled ids."""
    entries = about.get("output_token_logprobs")
    if entries is None:
        return None
    if [int(entry[1]) for entry in entries] != sampled:
        raise ArgumentError(
            f"{where}: output_token_logprobs are of other ids than output_ids. "
            "Fix: join the chunks of a stream first, or don't stream"
        )
    return np.array([entry[0] for entry in entries], dtype=np.float32)


def _routes(where: str, about: Mapping[str, Any], config: Any, length: int) -> np.ndarray | None:
    text = about.get(ROUTES)
    if text is None:
        return None
    return routes_of_rows(decoded_rows(text, config, where), length, where)


def _fields(request: Any) -> dict[str, Any]:
    """The fields of a request that are set."""
    given = dict(request) if isinstance(request, Mapping) else dict(vars(request))
    return {k: v for k, v in given.items() if v is not None}


def _images(where: str, request: dict[str, Any]) -> list[Any]:
    if request.get("video_data"):
        raise ArgumentError(
            f"{where}: its request has a video, and this adapter decodes none. Fix: leave the response out"
        )
    data = request.get("image_data")
    return [] if data is None else _opened(where, data)


def _opened(where: str, item: Any) -> list[Any]:
    """The images of one entry of image_data, as the processor takes them."""
    if isinstance(item, list | tuple):
        return [p for inner in item for p in _opened(where, inner)]
    item = getattr(item, "url", item)  # sglang's ImageData
    if isinstance(item, Mapping):
        raise ArgumentError(
            f"{where}: image_data holds what a processor made ({GRIDS['image']}). Fix: pass the pictures as images="
        )
    if not isinstance(item, str):
        return [item]
    if item.startswith(("http://", "https://")):
        raise ArgumentError(
            f"{where}: image_data has a URL, and mmpack fetches nothing. Fix: pass the pictures as images="
        )
    try:
        raw = base64.b64decode(item, validate=True)
    except ValueError:  # a data: URL, or a path
        return [item]
    return [raw if is_picture(raw) else item]
