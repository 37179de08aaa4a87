"""What a format of actions is: how a text marks a call, and how the call's JSON and an action become each other."""

from __future__ import annotations

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
