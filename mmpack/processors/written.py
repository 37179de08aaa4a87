"""Does a chat template write all of the messages that it is given? It is asked, not read.

Each text among the messages is replaced by a mark of its own, and all of them are rendered at once. What shows no mark
is changed (a text, a number) or left out (all else) by itself: if the rendering stays the same, it would be lost. Of
each text, all of it must be there, but for whitespace.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmpack.errors import ArgumentError, TemplateWarning, callers_level, require
from mmpack.processors.messages import KINDS, plain_messages

Render = Callable[[Sequence[dict[str, Any]], dict[str, Any]], str]
Path = tuple[Any, ...]  # keys and indices, from the list of messages on

# what ties messages, calls and answers together: no policy reads it, and many templates don't write it
_NAMES = ("role", "type", "id", "tool_call_id", "index")
_OF_RENDERING = ("add_generation_prompt", "continue_final_message")
_GENERATION = re.compile(
    r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}"
)  # a tag that only transformers knows
_WORDS = re.compile(r"<[^<>\s]*>|\w+|[^\w\s]")
_OPENING = 32  # characters of a prompt that may begin the answer, such as <think>


class Leaf(NamedTuple):
    """A piece of content: where it lies, what errors call it, and the kind of a medium."""

    path: Path
    name: str
    kind: str | None = None


def check_written(
    render: Render,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    text: str,
    pads: Mapping[str, str],
    since: int = 0,
    invented: int = 0,
    scored: bool = False,
) -> None:
    """Raise ArgumentError for what the template leaves out of `text`, its rendering of `messages` with `options`.

    Args: `messages`: as `plain_messages` makes them; those before `since` are not checked, and errors don't count the
    first `invented`. `pads`: modality to what stands for a medium in the text. A key that the template writes in the
    last message, and not in earlier ones (as of thoughts), is a TemplateWarning; so is a part of an assistant's
    text, unless the loss covers it (`scored`): see `check_turn`.
    """
    leaves = [leaf for m, message in enumerate(messages) for leaf in _leaves(message, m)]
    marks: dict[Path, str] = {}
    marked = list(messages)
    for path, _, kind in leaves:
        value = _at(messages, path)
        if kind is None and (isinstance(value, str) or path[-1] == "arguments"):
            mark = marks[path] = f"mmpack{len(marks):05d}mark"
            new = mark if isinstance(value, str) else {mark: mark}
            marked[path[0]] = _replaced(marked[path[0]], path[1:], new)
    try:
        shown = render(marked, options)
    except ArgumentError:  # the template minds what a text says
        shown = ""
    counted = {
        kind: shown.count(pad) == sum(leaf.kind == kind for leaf in leaves)
        for kind, pad in pads.items()
    }
    for leaf in leaves:
        sign = marks.get(leaf.path)
        if leaf.path[0] < since or counted.get(str(leaf.kind)):
            continue
        where = f"{leaf.name} of messages[{leaf.path[0] - invented}]"
        if sign is None or sign not in shown:
            if not _refuse_lost(render, messages, options, text, leaf, pads, where):
                _refuse_part(messages, leaf, text, where, scored)
            continue
        listed = f"'text': '{sign}'" in shown or f"{{'{sign}': '{sign}'}}" in shown
        coded = "Python's" if listed else None
        if leaf.path[-1] == "arguments" and f'"{sign}"' in shown:
            coded = "JSON's" if isinstance(_at(messages, leaf.path), str) else None
        if coded is not None:
            fix = "the call as text" if "tool_calls" in leaf.path else "one str"
            if coded == "JSON's" and "}" in _at(messages, leaf.path):
                fix += ", or an object with each key once and numbers that floats hold"
            raise ArgumentError(
                f"processor: the chat template writes {where} not as it is, but in {coded} notation. Fix: pass {fix}"
            )
        _refuse_part(messages, leaf, text, where, scored)


def check_turn(turn: str, prompt: str, message: dict[str, Any], name: str) -> None:
    """Raise ArgumentError where a turn that the loss covers lacks a part of its message's text.

    `turn`: as the template writes it behind `prompt`, which may begin the answer.
    """
    plain = plain_messages([message])
    for leaf in _leaves(plain[0], 0):
        part = _left_out(plain, leaf, prompt[-_OPENING:] + turn)
        if part:
            raise ArgumentError(
                f"processor: the chat template leaves out {part!r:.60} in {leaf.name} of {name} "
                f"({message['role']!r:.40}), so the policy would learn to answer without it. Fix: pass the sampled "
                "ids, or a chat_template that writes all of it"
            )


def check_read(
    render: Render,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    text: str,
    template: str,
) -> None:
    """Raise ArgumentError for an option that the template does not read, and for one with content it doesn't write."""
    for name, value in options.items():
        content = isinstance(value, (list, tuple, dict))
        if (
            name in _OF_RENDERING
            or _is_empty(value)
            or (name in _read_by(template) and not content)
        ):
            continue
        rest = {n: v for n, v in options.items() if n != name}
        if _same(render, messages, rest, text) and _same(
            render, messages, {**rest, name: _other(value)}, text
        ):
            near = difflib.get_close_matches(name, _read_by(template), 1)
            fix = f"write {near[0]}" if near and near[0] != name else "leave it out"
            raise ArgumentError(
                f"processor: the chat template does not write {name!r} of template_kwargs. "
                f"Fix: {fix}, or pass a chat_template that reads it"
            )


@functools.lru_cache(maxsize=32)
def _read_by(template: str) -> frozenset[str]:
    """The names that a template looks up; a few of its own are among them."""
    jinja2 = require("jinja2", "hf", "a chat template")
    meta = require("jinja2.meta", "hf", "a chat template")
    parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
        _GENERATION.sub("", template)
    )
    return frozenset(meta.find_undeclared_variables(parsed))


def _leaves(message: dict[str, Any], m: int) -> Iterator[Leaf]:
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            for p, part in enumerate(value):
                yield from _of_part(part, (m, "content", p))
        elif key == "tool_calls" and isinstance(value, list):
            for c, call in enumerate(value):
                yield from _of_call(call, (m, "tool_calls", c))
        elif key == "name" and message["role"] in ("tool", "function"):
            continue  # of the call that it answers
        elif key not in _NAMES and not _is_empty(value):
            yield Leaf((m, key), "the content" if key == "content" else f"the key {key!r:.40}")


def _of_part(part: dict[str, Any], path: Path) -> Iterator[Leaf]:
    name = f"content[{path[-1]}]"
    if part.get("type") in KINDS:
        yield Leaf(path, f"{name} ({part['type']})", part["type"])
    for key, value in part.items():
        if key not in _NAMES and not _is_empty(value):
            text = key == "text" and part.get("type") == "text"
            named = name if text else f"the key {key!r:.40} of {name}"
            yield Leaf((*path, key), f"{named} (of type {part.get('type')!r:.40})")


def _of_call(call: Mapping[str, Any], path: Path) -> Iterator[Leaf]:
    name = f"tool_calls[{path[2]}]"
    for key, value in call.items():
        if key == "function" and isinstance(value, Mapping):
            yield from _of_call(value, (*path, key))
        elif key not in _NAMES and not _is_empty(value):
            yield Leaf((*path, key), name if key == "name" else f"the key {key!r:.40} of {name}")


def _refuse_lost(
    render: Render,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    text: str,
    leaf: Leaf,
    pads: Mapping[str, str],
    where: str,
) -> bool:
    """Raise ArgumentError if the rendering stays the same without the leaf, or with another; return if it warned."""
    m = leaf.path[0]
    new = None if leaf.kind is not None else _other(_at(messages, leaf.path))
    changed = [*messages[:m], _replaced(messages[m], leaf.path[1:], new), *messages[m + 1 :]]
    pad = pads.get(str(leaf.kind))
    if not _same(render, changed, options, text, pad):
        return False
    role = messages[m]["role"]
    lost = f"processor: the chat template leaves out {where} ({role!r:.40})"
    last = {**options, "add_generation_prompt": False}
    if m < len(messages) - 1 and _differs(render, messages[: m + 1], changed[: m + 1], last, pad):
        warnings.warn(
            f"{lost}, for more messages follow. Fix: none, if the engine's template does the same",
            TemplateWarning,
            stacklevel=callers_level(),
        )
        return True
    raise ArgumentError(f"{lost}. Fix: {_fix(leaf, role)}, or pass a chat_template that writes it")


def _refuse_part(
    messages: Sequence[dict[str, Any]], leaf: Leaf, text: str, where: str, scored: bool
) -> None:
    """Raise ArgumentError if a part of a text is not in `text`; of an assistant's, as of thoughts, warn."""
    role = messages[leaf.path[0]]["role"]
    part = "" if scored and role == "assistant" else _left_out(messages, leaf, text)
    if not part:
        return
    lost = f"processor: the chat template leaves out {part!r:.60} in {where} ({role!r:.40})"
    if role != "assistant":
        raise ArgumentError(f"{lost}. Fix: take it out, or pass a chat_template that writes it")
    warnings.warn(
        f"{lost}. Fix: none, if the engine's template does the same",
        TemplateWarning,
        stacklevel=callers_level(),
    )


def _left_out(messages: Sequence[dict[str, Any]], leaf: Leaf, text: str) -> str:
    """The part of a text among the messages that `text` lacks, whitespace aside, as it is or as JSON; "": none."""
    value, key = _at(messages, leaf.path), str(leaf.path[-1])
    read = key in ("content", "text") or "reason" in key or "think" in key
    if not read or not isinstance(value, str) or leaf.path[1] == "tool_calls":
        return ""
    shown = "".join(text.split())
    coded = (json.dumps(value.strip(), ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    if any("".join(form.split()) in shown for form in (value, *coded)):
        return ""
    places = [(found.start(), found.end()) for found in _WORDS.finditer(value)]
    words = [value[a:b] for a, b in places]

    def lacks(a: int, b: int, since: int = 0) -> bool:
        return shown.find("".join(words[a:b]), since) < 0

    count = len(words)
    first = bisect_left(range(count), True, key=lambda k: lacks(0, k + 1))
    last = count - bisect_left(range(count), True, key=lambda k: lacks(count - k - 1, count))
    if first >= last:
        begun = "".join(words[:first])
        if not lacks(first, count, shown.find(begun) + len(begun)):
            return ""  # only something between its words
        last = count
    return value[places[first][0] : places[last - 1][1]]


def _fix(leaf: Leaf, role: str) -> str:
    key = leaf.path[1]
    if key.removesuffix("s") in KINDS:
        return f'write one part {{"type": "{key.removesuffix("s")}", …}} for each'
    if key == "tool_calls":
        return "write the call as the text that the policy wrote"
    if key != "content" or leaf.kind is not None:
        return "leave it out"
    if len(leaf.path) > 2:
        return "pass the content as one str" if role == "assistant" else "write a part of type text"
    return 'use a role that the template knows, or content=[{"type": "text", "text": …}]'


def _same(
    render: Render,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    text: str,
    pad: str | None = None,
) -> bool:
    """Whether they are rendered as `text`, or with as many `pad` as it has. What can't be rendered is missed."""
    try:
        found = render(messages, options)
    except ArgumentError:
        return False
    return found == text or (pad is not None and found.count(pad) == text.count(pad))


def _differs(
    render: Render,
    messages: Sequence[dict[str, Any]],
    changed: Sequence[dict[str, Any]],
    options: dict[str, Any],
    pad: str | None,
) -> bool:
    try:
        text = render(messages, options)
    except ArgumentError:
        return False
    return not _same(render, changed, options, text, pad)


def _is_empty(value: Any) -> bool:
    """What has no content can't be lost."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def _other(value: Any) -> Any:
    """Another value in its place: None where all that can be done is to leave it out."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "mmpackothermark" if isinstance(value, str) else None


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy with `new` at `path`, or without it where `new` is None."""
    step, *rest = path
    if rest:
        new = _replaced(value[step], tuple(rest), new)
    if isinstance(value, Mapping):
        return {
            k: new if k == step else v for k, v in value.items() if k != step or new is not None
        }
    return [new if k == step else v for k, v in enumerate(value) if k != step or new is not None]
