"""Calls to vLLM's server as trajectories: `/inference/v1/generate`, chat completions and completions with token ids.

A call is a request and its response, as objects of vLLM's or of a client, or as their JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Unpack

from mmpack.adapters.checks import as_list, is_list
from mmpack.adapters.engine_routes import npy_rows
from mmpack.adapters.episodes import (
    Options,
    check_episodes,
    fields_of,
    kept_as_json,
    named,
    part_of,
    read_episodes,
    reading,
    renamed,
    urls_of,
)
from mmpack.errors import ArgumentError, check_name
from mmpack.layout.names import SAMPLING_NAMES
from mmpack.processors.conversation import source_of
from mmpack.processors.data_url import is_data_url
from mmpack.processors.wrap import Processor
from mmpack.trajectory.chat import TOKEN, finish_of
from mmpack.trajectory.records import Record
from mmpack.trajectory.trajectory import Trajectory

KEY = "vllm"  # in Trajectory.metadata
LOGPROB_KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
# what the server writes for −inf, for NaN, and for an id that it has no logprob of
NO_LOGPROB = -9999.0
# fields of Record -> those of a choice
FIELDS = {
    "prompt_ids": "prompt_token_ids",
    "response_ids": "token_ids",
    "kept_ids": "sampling_mask",
}


def to_trajectories(
    episodes: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    media: Sequence[Any] | Mapping[str, Any] | None = None,
    logprobs_mode: str = "raw_logprobs",
    **options: Unpack[Options],
) -> list[Trajectory]:
    """One trajectory per episode, called `<group_id>/<k>`: each choice of each call is a turn.

    Args:
        episodes: per episode its calls in order, each `{"request": …, "response": …}`. The request was sent with
            `return_token_ids=True`; where the response has no prompt ids, the request's own `token_ids` are read.
        processor: `mp.wrap_processor` of the engine's own processor.
        group_ids: one per episode; None: episodes of one prompt are a group.
        media: a list per episode of a list per call, in the order of their placeholders; or vLLM's hash (as in
            `features.mm_hashes`) or an image's URL -> picture, for all. `data:` URLs of chat messages need neither.
        logprobs_mode: the engine's: `raw_logprobs` or `processed_logprobs`.
        options: `expanded`, `resampled`, `num_experts`, as of `mp.trajectory.from_records`; choices of one call are
            completions of one request. `sampling` (`temperature`, …, and `logprobs`); without it what the requests
            say, if all of an episode say the same.

    `sampling_mask` becomes `kept_ids`, `weight_versions` the policy's versions, `routed_experts` are decoded; what
    `routed_experts_prompt_start` left out is taken from the call that this one goes on from. Raises: ArgumentError,
    also for choices without token ids: nothing is encoded again (`mp.trajectory.from_calls` does that); LayoutError.
    """
    known: Mapping[str, Any] = media if isinstance(media, Mapping) else {}
    per_episode = None if isinstance(media, Mapping) else media
    given = check_episodes(episodes, "episodes", {"group_ids": group_ids, "media": per_episode})
    check_name("to_trajectories", "logprobs_mode", logprobs_mode, LOGPROB_KINDS)

    def read(i: int, where: str) -> tuple[list[Record], dict[str, Any]]:
        calls = as_list(given[i], where)
        own = None if per_episode is None else as_list(per_episode[i], f"{where}: media")
        if own is not None and len(own) != len(calls):
            raise ArgumentError(
                f"{where} has {len(calls)} calls, but media for {len(own)}. Fix: pass a list of pictures per call"
            )
        records: list[Record] = []
        asked: list[dict[str, Any]] = []
        for c, call in enumerate(calls):
            at = f"{where}[{c}]"
            with reading(at):
                request, response = _call(call, at)
                pictures = (
                    _media(request, known, at) if own is None else as_list(own[c], f"{at}: media")
                )
                records += _records(request, response, c, pictures, at)
                asked.append(kept_as_json(_sampling(request, at)))
        if options.get("sampling") is not None or not any(asked):
            return records, {}
        if any(a != asked[0] for a in asked):
            return records, {"metadata": {KEY: kept_as_json({"sampling": asked})}}
        return records, {"sampling": {**asked[0], "logprobs": LOGPROB_KINDS[logprobs_mode]}}

    names = [f"episodes[{i}]" for i in range(len(given))]
    return named(read_episodes(names, read, processor, options), group_ids)


def _call(given: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    call = fields_of(given, where)
    if "request" not in call or "response" not in call:
        raise ArgumentError(
            f'{where} has no request and response. Fix: pass {{"request": …, "response": …}} of each call'
        )
    request = fields_of(call["request"], f"{where}.request")
    response = fields_of(call["response"], f"{where}.response")
    if not is_list(response.get("choices")) or not len(response["choices"]):
        raise ArgumentError(f"{where}.response has no choices. Fix: leave out calls that failed")
    return request, response


def _records(
    request: dict[str, Any], response: dict[str, Any], number: int, media: list[Any], where: str
) -> list[Record]:
    """A record per choice."""
    params = part_of(request, "sampling_params", f"{where}.request")
    start = request.get("routed_experts_prompt_start", params.get("routed_experts_prompt_start"))
    usage = part_of(response, "usage", f"{where}.response")
    cached = part_of(usage, "prompt_tokens_details", f"{where}.response.usage")
    out = []
    for k, given in enumerate(response["choices"]):
        at = f"{where}.choices[{k}]"
        choice = fields_of(given, at)
        choice["prompt_token_ids"] = _prompt(request, response, choice)
        needed = ("prompt_token_ids", "token_ids")
        fields_of(choice, at, needed, "ask for return_token_ids=True")
        out.append(
            Record(
                **renamed(choice, FIELDS),
                media=media,
                logprobs=_logprobs(choice.get("logprobs"), list(choice["token_ids"]), at),
                policy_versions=_versions(choice.get("weight_versions"), at),
                routed_experts=_routes(choice.get("routed_experts"), at),
                routes_start=start or 0,
                finish_reason=finish_of(choice.get("finish_reason"), at),
                prefix_cached_tokens=cached.get("cached_tokens"),
                source=_source(request),
                request=number,
                metadata=_about(response, choice),
            )
        )
    return out


def _prompt(request: dict[str, Any], response: dict[str, Any], choice: dict[str, Any]) -> Any:
    """The engine's own prompt ids, expanded; else those that it was sent."""
    for holder, name in (
        (choice, "prompt_token_ids"),
        (response, "prompt_token_ids"),
        (request, "token_ids"),
        (request, "prompt"),
    ):
        value: Any = holder.get(name)
        if is_list(value) and len(value) and not isinstance(value[0], str | list):
            return value
    return None


def _logprobs(given: Any, ids: list[int], where: str) -> Any:
    """[R] of the sampled ids: numbers, or the objects of generate, chat completions and completions."""
    if given is None or is_list(given):
        return given
    fields = fields_of(given, f"{where}.logprobs")
    if fields.get("token_logprobs") is not None:
        return fields["token_logprobs"]
    if fields.get("content") is None:
        return None
    tokens = [fields_of(t, f"{where}.logprobs.content") for t in fields["content"]]
    if len(tokens) != len(ids):
        raise ArgumentError(
            f"{where} has {len(ids)} token_ids and {len(tokens)} logprobs. Fix: pass the whole choice"
        )
    for at, (own, token) in enumerate(zip(ids, tokens, strict=True)):
        named_as = TOKEN.fullmatch(str(token.get("token")))
        own_id = token.get("token_id", int(named_as[1]) if named_as else None)
        if own_id is not None and own_id != own:
            raise ArgumentError(
                f"{where}: logprobs.content[{at}] is of token {own_id}, token_ids has {own} there. "
                "Fix: pass the whole choice"
            )
    values = [t.get("logprob") for t in tokens]
    check_known(values, where)
    return values


def check_known(logprobs: Sequence[Any], where: str) -> None:
    """Raise ArgumentError for a sampled token that the server has no logprob of."""
    for at, value in enumerate(logprobs):
        if value is None or not NO_LOGPROB < value < math.inf:
            raise ArgumentError(
                f"{where}: sampled token {at} has no logprob, the server wrote {value}. "
                "Fix: drop the choice; its logprob was −inf or NaN"
            )


def _versions(given: Any, where: str) -> list[tuple[Any, Any, Any]] | None:
    """vLLM's spans count the choice's tokens."""
    if given is None:
        return None
    spans = [fields_of(s, f"{where}.weight_versions") for s in given]
    return [(s.get("start"), s.get("end"), s.get("version")) for s in spans]


def _routes(given: Any, where: str) -> Any:
    """[n, layers, k]: an array, or base64 of a `.npy` file, which holds all but the last token's."""
    return npy_rows(given, where) if isinstance(given, str) else given


def _media(request: dict[str, Any], known: Mapping[str, Any], where: str) -> list[Any]:
    """The pictures of a request: by the hashes of its features, or those of its messages."""
    if request.get("features") is not None:
        features = fields_of(request["features"], f"{where}.request.features")
        found = []
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            ranges = features["mm_placeholders"][modality]
            for digest, place in zip(hashes, ranges, strict=True):
                offset = fields_of(place, f"{where}.request.features")["offset"]
                found.append((index(offset), digest))
        return [_known(digest, known, where) for _, digest in sorted(found)]
    urls = [
        url
        for m, message in enumerate(request.get("messages") or ())
        for url in urls_of(message, f"{where}.request.messages[{m}]")
    ]
    return [url if is_data_url(url) else _known(url, known, where) for url in urls]


def _known(name: str, known: Mapping[str, Any], where: str) -> Any:
    if name not in known:
        raise ArgumentError(
            f"{where}: no medium has the name {name!r:.80}. "
            f"Fix: pass media={{hash or URL: picture}}, or a list per call"
        )
    return known[name]


def _source(request: dict[str, Any]) -> str:
    """Who wrote what is new: the roles behind the last answer."""
    roles: list[str] = []
    for message in request.get("messages") or ():
        role = fields_of(message, "to_trajectories: a message").get("role")
        roles = [] if role == "assistant" else [*roles, str(role)]
    return source_of(roles) if roles else "environment"


def _sampling(request: dict[str, Any], where: str) -> dict[str, Any]:
    params = part_of(request, "sampling_params", f"{where}.request")
    found = {n: request.get(n, params.get(n)) for n in SAMPLING_NAMES}
    return {n: v for n, v in found.items() if v is not None}


def _about(response: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    name = response.get("request_id", response.get("id"))
    about = {
        "request_id": name,
        "index": choice.get("index"),
        "stop_reason": choice.get("stop_reason"),
    }
    return {KEY: kept_as_json(about)}
