"""Chat logs in OpenAI's form, with pictures: conversations (`from_chat`) and calls (`from_calls`), as trajectories.

Token ids in a log are used as they are. What a log has only as text is rendered and encoded by the processor, as a new
prompt would be, and marked: `Turn.metadata["reencoded"]` lists "context", "response" or both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.layout.occurrences import occurring_media
from mmpack.processors.arguments import as_ids, check_names, template_options
from mmpack.processors.conversation import source_of, warn_of_opening
from mmpack.processors.messages import KINDS, parts_of, plain_part
from mmpack.processors.wrap import Processor
from mmpack.processors.written import check_turn
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.trajectory.trajectory import SETTABLE, Trajectory, Turn, made_with

# OpenAI's reasons and vLLM's -> those of Sample
FINISH = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool",
    "function_call": "tool",
    "abort": "abort",
    "content_filter": "abort",
}
_RECORDED = ("token_ids", "logprobs", "finish_reason")  # of an assistant's message
# how vLLM writes a token with return_tokens_as_token_ids
TOKEN = re.compile("token_id:([0-9]{1,18})")


class Answer(NamedTuple):
    """Answer of the policy: ids, logprobs [n] or None, and whether the ids are the log's own."""

    ids: np.ndarray
    logprobs: Any
    recorded: bool


def from_chat(
    messages: Sequence[Any],
    processor: Processor,
    *,
    trajectory_id: str,
    group_id: str,
    media: Sequence[Any] = (),
    template_kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> Trajectory:
    """One conversation: each assistant message is a turn and carries loss; all else is context.

    Args:
        messages: role, content (text, or parts of type text, image, image_url with a data: URL, video), tool_calls. An
            assistant's message may have `token_ids` as sampled, `logprobs` of them (numbers, or OpenAI's object) and
            `finish_reason`. Messages after the last answer are left out: no loss token reads them.
        processor: `mp.wrap_processor` of the model's processor: the chat template writes the context.
        media: for parts that hold none, in order, as `processor.__call__` takes them.
        template_kwargs: of the chat template, such as `tools`.
        fields: rewards, costs, verifiers, sampling, metadata of Trajectory.

    Contexts grow from answer to answer by `processor.append`, so the ids of an answer stay as they are in all later
    contexts. Logprobs of an answer without ids are dropped: they are of tokens that the log does not name.
    Raises: ArgumentError, LayoutError.
    """
    check_names(fields, SETTABLE, "from_chat", "Trajectory", templates=True)
    template_options(template_kwargs, prompt=True)
    given = _messages(messages, "from_chat: messages")
    answers = [k for k, m in enumerate(given) if m["role"] == "assistant"]
    if not answers:
        raise ArgumentError(
            "from_chat: no message is an assistant's. Fix: pass a conversation with answers"
        )
    shown, _ = _media_of(given, media, processor)
    turns: list[Turn] = []
    sample: Sample | None = None
    begin = 0
    for k in answers:
        if k == begin:
            raise ArgumentError(
                f"from_chat: messages[{k}] is an assistant's, but no message comes before it. "
                "Fix: put the prompt before it"
            )
        where = f"from_chat: messages[{k}]"
        answer = _answer(given[k], processor, where)
        if answer is None:
            answer = _rendered(processor, shown[:k], shown[k], template_kwargs, k)
        asked = shown[begin:k]
        source = source_of([m["role"] for m in asked])
        if sample is None:
            sample = processor(
                asked,
                answer.ids,
                sample_id=trajectory_id,
                group_id=group_id,
                template_kwargs=template_kwargs,
            )
        else:
            sample = processor.append(
                sample,
                messages=asked,
                source=source,
                response_ids=answer.ids,
                template_kwargs=template_kwargs,
            )
        marks = ["context"] if answer.recorded else ["context", "response"]
        start = len(sample) - len(answer.ids)
        turns.append(
            Turn(
                sample.input_ids[:start],
                answer.ids,
                occurring_media(sample, start),
                answer.logprobs,
                source=source,
                finish_reason=finish_of(given[k].get("finish_reason"), f"messages[{k}]"),
                metadata={"reencoded": marks},
            )
        )
        begin = k + 1
    return made_with(processor, trajectory_id, group_id, turns, fields)


def from_calls(
    calls: Sequence[Any],
    processor: Processor,
    *,
    trajectory_id: str,
    group_id: str,
    expanded: bool = True,
    template_kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> Trajectory:
    """The calls of one episode to a chat endpoint, in order: each choice is a turn, with the context of its own call.

    Args:
        calls: objects or dicts with `messages` (or `request` with them) and `choices` (or `response` with them). Ids
            are read where an engine returns them: `prompt_token_ids` of the response or choice, `token_ids` of the
            choice, or `logprobs.content` with tokens written as "token_id:5".
        processor, template_kwargs, fields: as of `from_chat`.
        expanded: whether a picture has one id per vision token in `prompt_token_ids`, or one in all.

    A context that is there only as messages is rendered anew; `to_samples` merges turns only where the ids agree.
    Raises: ArgumentError, LayoutError.
    """
    check_names(fields, SETTABLE, "from_calls", "Trajectory", templates=True)
    if isinstance(calls, Mapping | str | bytes) or not isinstance(calls, Sequence) or not calls:
        what = "no call" if isinstance(calls, Sequence) and not calls else kind_of(calls)
        raise ArgumentError(f"from_calls: calls is {what}. Fix: pass the calls of one episode")
    turns: list[Turn] = []
    for i, call in enumerate(calls):
        where = f"from_calls: calls[{i}]"
        request, response = _call(call, where)
        given = _messages(request.get("messages"), f"{where}.messages")
        shown, own = _media_of(given, (), processor)
        options = {**template_options(template_kwargs, prompt=True)}
        if request.get("tools") is not None:
            options.setdefault("tools", request["tools"])
        contexts: dict[bytes, Sample] = {}
        for c, choice in enumerate(response["choices"]):
            at = f"{where}.choices[{c}]"
            choice = _plain(choice, at)
            known = choice.get("prompt_token_ids", response.get("prompt_token_ids"))
            named: dict[str, Any] = {"sample_id": f"{trajectory_id}/{i}", "group_id": group_id}
            ids = b"" if known is None else as_ids(known, processor.vocab_size).tobytes()
            if ids not in contexts:
                contexts[ids] = (
                    processor(shown, template_kwargs=options, **named)
                    if known is None
                    else processor.from_ids(known, own, expanded, (), **named)
                )
            context = contexts[ids]
            message = _message(choice.get("message"), f"{at}.message")
            answer = _answer(message | choice, processor, at)
            if answer is None:
                answer = _rendered(processor, shown, message, options, i)
            marks = ["context"] * (known is None) + ["response"] * (not answer.recorded)
            turns.append(
                Turn(
                    context.input_ids,
                    answer.ids,
                    occurring_media(context),
                    answer.logprobs,
                    source=source_of([given[-1]["role"]]),
                    finish_reason=finish_of(choice.get("finish_reason"), at),
                    metadata={"reencoded": marks} if marks else {},
                )
            )
    return made_with(processor, trajectory_id, group_id, turns, fields)


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(given, Mapping | str | bytes) or not isinstance(given, Sequence):
        raise ArgumentError(f"{where} is {kind_of(given)}, expected a list. Fix: pass the messages")
    return [_message(m, f"{where}[{i}]") for i, m in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    """A message whose content is a text or parts, and whose tool calls are dicts."""
    message = _plain(given, where)
    if not isinstance(message.get("role"), str):
        raise ArgumentError(f"{where} has no role. Fix: pass chat messages")
    if message.get("content") is None:
        message["content"] = ""
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        if not isinstance(calls, list | tuple):
            raise ArgumentError(
                f"{where}.tool_calls is {kind_of(calls)}, expected a list. Fix: pass the whole object"
            )
        message["tool_calls"] = [_plain(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return message


def _plain(given: Any, where: str) -> dict[str, Any]:
    """A dict of a mapping or of a client's object."""
    dump = getattr(given, "model_dump", None)
    value = dump() if callable(dump) else given
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"{where} is {kind_of(given)}, expected an object. Fix: pass the whole object"
        )
    return dict(value)


def _call(given: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    call = _plain(given, where)
    request = _plain(call.get("request", call), f"{where}.request")
    response = _plain(call.get("response", call), f"{where}.response")
    choices = response.get("choices")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise ArgumentError(f"{where} has no choices. Fix: pass each call's request and response")
    return request, response


def _media_of(
    messages: list[dict[str, Any]], media: Sequence[Any], processor: Processor
) -> tuple[list[dict[str, Any]], list[Medium]]:
    """Messages with processed media and without what was recorded, and these media in order."""
    plain = [{k: v for k, v in m.items() if k not in _RECORDED} for m in messages]
    items = [
        processor.medium(item, f"processor: media[{i}]", kind)
        for i, (kind, item) in enumerate(parts_of(plain, media))
    ]
    left = iter(items)
    shown = []
    for m, message in enumerate(plain):
        if not isinstance(message["content"], str):
            parts = []
            for p, part in enumerate(message["content"]):
                bare = plain_part(part, f"processor: messages[{m}].content[{p}]")
                if (kind := bare.get("type")) in KINDS:
                    bare[kind] = next(left)
                    if kind == "video" and part.get("audio") is not None:
                        bare["audio"] = next(left)
                parts.append(bare)
            message = {**message, "content": parts}
        shown.append(message)
    return shown, items


def _answer(holder: Mapping[str, Any], processor: Processor, where: str) -> Answer | None:
    """Return what was sampled, if the log has its ids."""
    recorded = holder.get("logprobs")
    content = recorded.get("content") if isinstance(recorded, Mapping) else None
    if content is not None and not (
        isinstance(content, list | tuple) and all(isinstance(t, Mapping) for t in content)
    ):
        raise ArgumentError(
            f"{where}: logprobs.content is not a list of objects. Fix: pass what the engine returned"
        )
    ids = holder.get("token_ids")
    if ids is None and content:
        numbers = [
            TOKEN.fullmatch(t["token"]) if isinstance(t.get("token"), str) else None
            for t in content
        ]
        if all(numbers):
            ids = [int(n[1]) for n in numbers if n]
    if ids is None:
        return None
    values = [t.get("logprob") for t in content] if content else recorded
    if isinstance(values, Mapping):
        values = None
    sampled = as_ids(ids, processor.vocab_size, "token_ids")
    if values is not None and not (
        isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim)
    ):
        raise ArgumentError(
            f"{where}: logprobs is {kind_of(values)}. Fix: pass one value per sampled id, or OpenAI's object"
        )
    if values is not None and len(values) != len(sampled):
        raise ArgumentError(
            f"{where} has {len(sampled)} token_ids and {len(values)} logprobs. Fix: pass one value per sampled id"
        )
    return Answer(sampled, values, True)


def _rendered(
    processor: Processor,
    before: list[dict[str, Any]],
    message: dict[str, Any],
    template_kwargs: dict[str, Any] | None,
    k: int,
) -> Answer:
    """Return what the template writes for an answer after its generation prompt, with the end of turn."""
    options = template_options(template_kwargs, prompt=True)
    count = len(before)
    asked = processor.prompts.rendered(
        before, {**options, "add_generation_prompt": True}, since=count
    )
    whole = processor.prompts.rendered(
        [*before, message], {**options, "add_generation_prompt": False}, since=count, scored=True
    )
    if not whole.startswith(asked):
        raise ArgumentError(
            f"processor: message {k} as the chat template writes it does not continue the generation prompt, so "
            "the answer's text is not known. Fix: pass token_ids, or another chat_template"
        )
    check_turn(whole[len(asked) :], asked, message, f"message {k}")
    warn_of_opening(whole[len(asked) :], message, f"message {k}")
    return Answer(processor.prompts.encoded(whole[len(asked) :].rstrip(), ()), None, False)


def finish_of(reason: Any, where: str) -> str | None:
    """Sample's name of a finish reason. Raises: ArgumentError for an unknown one."""
    if reason is None:
        return None
    if not isinstance(reason, str) or reason not in FINISH:
        shown = f"{reason!r:.40}" if isinstance(reason, str) else kind_of(reason)
        raise ArgumentError(
            f"{where} has finish_reason {shown}. Fix: use one of {', '.join(FINISH)}"
        )
    return FINISH[reason]
