"""What a format of actions is: how a text marks a call, and how the call's JSON and an action become each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmpack.schema.actions import Action


@dataclass(frozen=True)
class Call:
    """A call in a text: characters [start, stop), and those of its JSON; or why it is none."""

    start: int
    stop: int
    json_start: int = 0
    json_stop: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Format:
    """A format of actions that a model writes.

    `next_call(text, at)`: the first call that starts at character `at` or later, None without one.
    `read(value, where)`: the action of a call's parsed JSON; raises TraceError.
    `write(action)`: the call as JSON values; raises ArgumentError for an action that the format can't hold.
    `text(value)`: the call as the model writes it.
    `place(value, name)`: the names that lead to the JSON of a field that is a point.
    """

    name: str
    next_call: Callable[[str, int], Call | None] = field(repr=False)
    read: Callable[[Any, str], Action] = field(repr=False)
    write: Callable[[Action], dict[str, Any]] = field(repr=False)
    text: Callable[[dict[str, Any]], str] = field(repr=False)
    place: Callable[[Any, str], tuple[str, ...]] = field(repr=False)


_SURROGATE = re.compile("[\ud800-\udfff]")


def plain_numbers(value: Any) -> Any:
    """A tree of JSON values with whole floats as integers: 3 and not 3.0, as models write coordinates."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, (list, tuple)):
        return [plain_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: plain_numbers(v) for k, v in value.items()}
    return value


def json_text(value: Any) -> str:
    """JSON on one line, letters as they are; lone surrogates escaped, which no encoding holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
