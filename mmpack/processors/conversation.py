"""What a chat template writes: where each assistant turn of a conversation lies, and what follows a turn.

A template is asked, not read: beginnings of the conversation are rendered, and each must begin the next. That needs no
{% generation %} marks, which released templates don't have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from mmpack.errors import ArgumentError, TemplateWarning, callers_level
from mmpack.processors.written import check_turn

Render = Callable[..., str]  # (messages, add_generation_prompt=…) -> text
_ANSWER = "[mmpack: the answer]"
PAST = 2  # messages that `after_a_turn` invents


def assistant_turns(
    render: Render, messages: Sequence[dict[str, Any]], whole: str
) -> list[tuple[int, int]]:
    """[start, stop) in the text `whole`, of all messages, of what the policy wrote in each assistant turn.

    A turn begins where the generation prompt ends and includes the end-of-turn token, but not the line break that a
    template writes behind it. Raises: ArgumentError where a template writes a turn differently once another follows.
    """
    turns = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not k:
            raise ArgumentError(
                "processor: messages[0] is an assistant's turn, but no prompt comes before it. "
                "Fix: put its prompt before it"
            )
        before = render(messages[:k], add_generation_prompt=True)
        after = render(messages[: k + 1], add_generation_prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ArgumentError(
                f"processor: the chat template writes messages[{k}] differently when it is the last one (as where it "
                "strips thinking), so the policy saw another text. Fix: build the sample turn by turn with append, "
                "from the sampled ids, or pass a chat_template that leaves turns as they are"
            )
        turns.append((len(before), len(after.rstrip())))
        check_turn(after[len(before) :], before, message, f"messages[{k}]")
        warn_of_opening(after[len(before) :], message, f"messages[{k}]")
    if not turns:
        raise ArgumentError(
            "processor: assistant_loss=True, but no message is an assistant's. Fix: leave it out, or pass response_ids"
        )
    return turns


def warn_of_opening(turn: str, message: dict[str, Any], name: str) -> None:
    """Warn where a turn begins with what the template wrote, as one that opens `<think>` in the prompt and in turns.

    A turn whose message has no text, or thoughts under a key of their own, may begin with a tag.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content)
    own, begins = content.strip(), turn.split(maxsplit=1)[:1]
    if not own or any("reason" in key or "think" in key for key, value in message.items() if value):
        return
    if turn.lstrip().startswith(own) or (begins and begins[0] in own):
        return
    warnings.warn(
        f"processor: the turn of {name} begins with {turn.strip()[:24]!r}, which the chat template wrote and the "
        "message does not hold, and the loss covers it. Fix: pass the sampled ids as response_ids, or a "
        "chat_template that writes the message's own text behind the generation prompt",
        TemplateWarning,
        stacklevel=callers_level(),
    )


def sources(messages: Sequence[dict[str, Any]]) -> list[str]:
    """For each assistant turn and for the end: the role that precedes it, `tool` or `user`."""
    out, since = [], list[str]()
    for message in messages:
        if message["role"] == "assistant":
            out.append(source_of(since))
            since = []
        else:
            since.append(message["role"])
    return [*out, source_of(since)]


def source_of(roles: Sequence[str]) -> str:
    """`ObservationSpan.source` of messages of these roles."""
    return "tool" if "tool" in roles else "user"


def after_a_turn(
    render: Render, messages: Sequence[dict[str, Any]], modalities: Sequence[str]
) -> tuple[str, str]:
    """What the template writes after an assistant's text: up to the turn's end, and up to the next generation prompt.

    `messages`: the observation; `modalities`: `image` or `video`, of the media before it (templates may count them).
    The second text begins with the first. Raises: ArgumentError.
    """
    if any(message["role"] in ("assistant", "system") for message in messages):
        raise ArgumentError(
            "processor.append: messages may hold the environment's turns only. "
            "Fix: leave out system messages, and pass the assistant's text as response_ids"
        )
    seen = [{"type": kind} for kind in modalities]
    past = [
        {"role": "user", "content": [*seen, {"type": "text", "text": "?"}] if seen else "?"},
        {"role": "assistant", "content": _ANSWER},
    ]
    closed = render(past, add_generation_prompt=False)
    whole = render([*past, *messages], add_generation_prompt=True)
    _, *ends = closed.split(_ANSWER)
    _, *between = whole.split(_ANSWER)
    if len(ends) != 1 or len(between) != 1 or not between[0].startswith(ends[0]):
        raise ArgumentError(
            "processor.append: the chat template ends a turn differently when another follows, so the text "
            "between two turns is not known. Fix: pass observation_ids, as the engine saw them"
        )
    return ends[0], between[0]
