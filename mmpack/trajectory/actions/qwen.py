"""Qwen's tools `computer_use` and `mobile_use`, as the cookbooks of Qwen2.5-VL and Qwen3-VL define them.

A call is JSON between marks: `{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [x, y]}}`
between `<tool_call>` and `</tool_call>`.
Coordinates are pixels of the picture as the model saw it (Qwen2.5-VL) or of a screen of 1000 × 1000 (Qwen3-VL). A call
of any other tool is a ToolCall.

What differs: Qwen3-VL's `computer_use` adds `triple_click`, `hscroll` and `answer`, and clicks may have a `coordinate`,
which Qwen2.5-VL's lack (they click where `mouse_move` left the cursor); both are read. `mobile_use` has no `answer` in
the tool's file, and the mobile cookbook of Qwen3-VL has: it is read. Above 0, `pixels` scroll up; of `hscroll` the
definition says no direction, here it is to the right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import neg
from typing import Any

from mmpack.errors import ArgumentError
from mmpack.schema.actions import (
    SYSTEM_BUTTONS,
    Action,
    Answer,
    Click,
    DoubleClick,
    Drag,
    Key,
    LongPress,
    Move,
    Names,
    OpenApp,
    Scroll,
    Seconds,
    Swipe,
    SystemButton,
    Terminate,
    Text,
    ToolCall,
    TripleClick,
    Type,
    Wait,
    make_action,
)
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.fields import keep_unknown
from mmpack.schema.specs import Float, Floats, Json, Spec, Str

# ---- a format of actions -------------------------------------------------------------------------


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


# ---- the tools -----------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = "call"  # in `metadata`: what stands in the call other than its name and arguments


@dataclass(frozen=True)
class Argument:
    """An argument of a tool: the field of the action that it is, what it accepts, and how values are turned."""

    name: str
    field: str
    spec: Spec
    required: bool = True
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Row:
    """An action of a tool: what it is called there, what it is here."""

    name: str
    cls: type[Action]
    arguments: tuple[Argument, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()  # fields that follow from the name

    def lacks(self, action: Action) -> list[str]:
        """Fields of the action that the row can't hold, or needs and misses."""
        held = {a.field: a for a in self.arguments}
        fixed = dict(self.fixed)
        out = []
        for name in type(action).columns():
            value = getattr(action, name)
            if name == "metadata":
                continue
            if name in fixed:
                out += [name] if value != fixed[name] else []
            elif name in held:
                out += [f"lack of {name}"] if value is None and held[name].required else []
            elif value not in (None, ()):
                out.append(name)
        return out


def _point(required: bool = True) -> Argument:
    return Argument("coordinate", "point", Floats(2), required)


_PIXELS = Argument("pixels", "dy", Float(), read=neg, write=neg)
_TIME = Argument("time", "seconds", Seconds())
_TEXT = Argument("text", "text", Text())
_STATUS = Argument("status", "status", Str())
_HERE = (_point(required=False),)  # or where the cursor is
_CAPITALS = tuple(name.capitalize() for name in SYSTEM_BUTTONS)

TOOLS: dict[str, tuple[Row, ...]] = {
    "computer_use": (
        Row("key", Key, (Argument("keys", "keys", Names(least=1)),)),
        Row("type", Type, (_TEXT,)),
        Row("mouse_move", Move, (_point(),)),
        Row("left_click", Click, _HERE, (("button", "left"),)),
        Row(
            "left_click_drag",
            Drag,
            (Argument("coordinate", "to", Floats(2)),),
            (("button", "left"),),
        ),
        Row("right_click", Click, _HERE, (("button", "right"),)),
        Row("middle_click", Click, _HERE, (("button", "middle"),)),
        Row("double_click", DoubleClick, _HERE),
        Row("triple_click", TripleClick, _HERE),
        Row("scroll", Scroll, (_PIXELS, *_HERE)),
        Row("hscroll", Scroll, (Argument("pixels", "dx", Float()), *_HERE)),
        Row("wait", Wait, (_TIME,)),
        Row("terminate", Terminate, (_STATUS,)),
        Row("answer", Answer, (_TEXT,)),
    ),
    "mobile_use": (
        Row(
            "key",
            Key,
            (Argument("text", "keys", Text(), read=lambda v: [v], write=lambda v: v[0]),),
        ),
        Row("click", Click, (_point(),), (("button", "left"),)),
        Row("long_press", LongPress, (_point(), _TIME)),
        Row("swipe", Swipe, (_point(), Argument("coordinate2", "to", Floats(2)))),
        Row("type", Type, (_TEXT,)),
        Row(
            "system_button",
            SystemButton,
            (Argument("button", "button", Str(_CAPITALS), read=str.lower, write=str.capitalize),),
        ),
        Row("open", OpenApp, (Argument("text", "app", Text()),)),
        Row("wait", Wait, (_TIME,)),
        Row("terminate", Terminate, (_STATUS,)),
        Row("answer", Answer, (_TEXT,)),
    ),
}


def read_call(value: Any, tool: str, where: str) -> Action:
    """The action of a call's JSON, `{"name": …, "arguments": …}`. Raises TraceError."""
    if not isinstance(value, dict):
        raise trace_error(where, f"expected an object, found {shown(value)}")
    for name in ("name", "arguments"):
        if value.get(name) is None:
            raise trace_error(f"{where}.{name}", "is missing", "MM004")
    name = Text().read(value["name"], f"{where}.name")
    arguments = Json().read(value["arguments"], f"{where}.arguments")
    more = {k: v for k, v in value.items() if k not in ("name", "arguments")}
    metadata = {CALL: Json().read(more, where)} if more else {}
    if name == tool:
        return _read_arguments(arguments, tool, metadata, f"{where}.arguments")
    if name in TOOLS:
        raise trace_error(f"{where}.name", f"is {name}, expected {tool}")
    return make_action(
        ToolCall, {"name": name, "arguments": arguments, "metadata": metadata}, where
    )


def _read_arguments(given: dict[str, Any], tool: str, metadata: dict[str, Any], at: str) -> Action:
    if given.get("action") is None:
        raise trace_error(f"{at}.action", "is missing", "MM004")
    names = tuple(row.name for row in TOOLS[tool])
    name = Str(names).read(given["action"], f"{at}.action")
    row = next(row for row in TOOLS[tool] if row.name == name)
    fields: dict[str, Any] = dict(row.fixed)
    for argument in row.arguments:
        value = given.get(argument.name)
        if value is not None:
            fields[argument.field] = argument.read(
                argument.spec.read(value, f"{at}.{argument.name}")
            )
        elif argument.required:
            raise trace_error(f"{at}.{argument.name}", "is missing", "MM004")
    known = {"action", *(argument.name for argument in row.arguments)}
    kept = keep_unknown({k: v for k, v in given.items() if k not in known}, metadata)
    return make_action(row.cls, fields | ({"metadata": kept} if kept else {}), at)


def write_call(action: Action, tool: str) -> dict[str, Any]:
    """The call of `tool` that is the action, as JSON values. Raises ArgumentError for what the tool can't do."""
    metadata = dict(action.metadata)  # type: ignore[attr-defined]
    more = metadata.pop(CALL, {})
    if not isinstance(more, dict) or more.keys() & {"name", "arguments"}:
        raise _refused(
            action, tool, f"metadata[{CALL!r}] is not an object of other names", "drop it"
        )
    if isinstance(action, ToolCall):
        if action.name in TOOLS:
            raise _refused(action, tool, f"it calls {action.name}", "write that tool's actions")
        if metadata:
            raise _refused(action, tool, "a tool call has no place for metadata", "drop it")
        return {"name": action.name, "arguments": action.arguments, **more}
    rows = [row for row in TOOLS[tool] if isinstance(action, row.cls)]
    fitting = [row for row in rows if not row.lacks(action)]
    if not fitting:
        lacking = rows[0].lacks(action) if rows else []
        why = (
            f"which has no place for its {', '.join(lacking)}"
            if lacking
            else "the tool has no such action"
        )
        raise _refused(action, tool, why, "choose another format, or an action that it has")
    row = fitting[0]
    if isinstance(action, Key) and tool == "mobile_use" and len(action.keys) > 1:
        raise _refused(action, tool, "it presses more than one key", "press one at a time")
    arguments = {"action": row.name}
    for argument in row.arguments:
        value = getattr(action, argument.field)
        if value is not None:
            arguments[argument.name] = plain_numbers(argument.write(value))
    if metadata.keys() & {"action", *(argument.name for argument in row.arguments)}:
        raise _refused(action, tool, "metadata holds a name of its arguments", "drop it")
    return {"name": tool, "arguments": {**arguments, **metadata}, **more}


def _refused(action: Action, tool: str, why: str, fix: str) -> ArgumentError:
    return ArgumentError(f"write_action: {tool} can't hold {action.kind!r}, {why}. Fix: {fix}")


# ---- as text -------------------------------------------------------------------------------------


def _next_call(text: str, at: int) -> Call | None:
    """Return the next call: from a mark to the first that closes it, as the parsers of engines read it."""
    start = text.find(OPEN, at)
    if start < 0:
        return None
    inside = start + len(OPEN)
    again = text.find(OPEN, inside)
    last = len(text) if again < 0 else again
    end = text.find(CLOSE, inside, last)
    if end < 0:
        return Call(start, last, fault="is not closed")
    return Call(start, end + len(CLOSE), inside, end)


def _text(value: dict[str, Any]) -> str:
    """Return a call as text, marks within strings escaped: no parser takes them for the call's own."""
    body = json_text(value).replace(CLOSE, "<\\/tool_call>").replace(OPEN, "\\u003ctool_call>")
    return f"{OPEN}\n{body}\n{CLOSE}"


def _format(tool: str) -> Format:
    def place(value: Any, name: str) -> tuple[str, ...]:
        row = next(row for row in TOOLS[tool] if row.name == value["arguments"]["action"])
        return "arguments", next(a.name for a in row.arguments if a.field == name)

    return Format(
        tool,
        _next_call,
        lambda value, where: read_call(value, tool, where),
        lambda action: write_call(action, tool),
        _text,
        place,
    )


COMPUTER_USE, MOBILE_USE = _format("computer_use"), _format("mobile_use")
