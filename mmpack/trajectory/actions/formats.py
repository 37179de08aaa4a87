"""Formats of actions: what a model writes, and the typed action that it means.

`json` is mmpack's own: `{"kind": "click", "point": [3, 4]}`, an object anywhere in a text, its `kind` first.
`computer_use` and `mobile_use` are Qwen's tools.
"""

from __future__ import annotations

import re
from typing import Any

from mmpack.errors import ArgumentError, check_name, kind_of
from mmpack.schema import actions
from mmpack.schema.actions import Action, Text
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.specs import Json, Str
from mmpack.trajectory.actions.qwen import (
    COMPUTER_USE,
    MOBILE_USE,
    TOOLS,
    Call,
    Format,
    json_text,
    plain_numbers,
    read_call,
    write_call,
)
from mmpack.trajectory.actions.strict_json import end_of_json, read_json

_BEGIN = re.compile(r'\{\s*"kind"\s*:')


def _next_call(text: str, at: int) -> Call | None:
    match = _BEGIN.search(text, at)
    if match is None:
        return None
    start = match.start()
    stop, _ = end_of_json(text, start)
    if stop < 0:  # what follows may be its rest: nothing there is read as another action
        return Call(start, len(text), fault="is not closed")
    return Call(start, stop, start, stop)


PLAIN = Format(
    "json",
    _next_call,
    actions.read_action,
    lambda action: plain_numbers(action.to_dict()),
    json_text,
    lambda value, name: (name,),
)
FORMATS: dict[str, Format] = {f.name: f for f in (PLAIN, COMPUTER_USE, MOBILE_USE)}


def get_format(what: str, name: str | Format) -> Format:
    """The format called `name`. Raises ArgumentError, in the name of the function `what`."""
    if isinstance(name, Format):
        return name
    check_name(what, "format", name, FORMATS)
    return FORMATS[name]


def read_action(value: Any, format: str | Format = "json") -> Action:
    """The typed action that a call means.

    Args: `value`: the call as text, with its marks or without, or its parsed JSON. `format`: `json` (mmpack's own,
    objects with a `kind`), `computer_use` or `mobile_use` (Qwen's tools).
    Unknown fields are kept in `metadata`.
    Raises: TraceError, with `code`, `where` and `why`, for all that is no such call: an unknown kind, an argument that
    is missing or of another type, NaN, text that is no JSON, of any depth and length.

    Example:
        >>> from mmpack.trajectory import read_action
        >>> call = {"action": "scroll", "pixels": -300}
        >>> read_action({"name": "computer_use", "arguments": call}, "computer_use")
        Scroll(dy=300.0)
    """
    form = get_format("read_action", format)
    if not isinstance(value, str):
        return form.read(value, "action")
    call = form.next_call(value, 0)
    if call is None or value.lstrip().startswith("{"):  # its JSON, whatever its strings hold
        return form.read(read_json(value, "action"), "action")
    if call.fault:
        raise trace_error("action", call.fault, "MM211")
    if value[: call.start].strip() or value[call.stop :].strip():
        raise trace_error("action", "has text beside the call", "MM211")
    return form.read(read_json(value[call.json_start : call.json_stop], "action"), "action")


def write_action(action: Action, format: str | Format = "json") -> dict[str, Any]:
    """The call that means an action, as JSON values: what `read_action` reads.

    Raises: ArgumentError for an action that the format can't hold, as a click with modifiers in `computer_use`.
    """
    form = get_format("write_action", format)
    if not isinstance(action, Action):
        raise ArgumentError(
            f"write_action: the action is {kind_of(action)}. "
            "Fix: pass an action of mmpack.schema.actions, or what read_action returned"
        )
    return form.write(action)


def action_text(action: Action, format: str | Format = "json") -> str:
    """The call as a model writes it, with the marks of the format. Raises as `write_action` does."""
    return get_format("action_text", format).text(write_action(action, format))


# ---- records of servers: no tokens, so `find_actions` reads the text itself ------------------------


def read_tool_call(record: Any, where: str = "tool_call") -> Action:
    """The action of one item of a message's `tool_calls`.

    `arguments` is a JSON text, or the object itself. Calls of `computer_use` and `mobile_use` become their actions, any
    other a ToolCall. The record's `id` and what else it holds is kept in `metadata["call"]`.
    Raises: TraceError, which says what is wrong, where, and its fix.

    Example:
        >>> from mmpack.trajectory import read_tool_call
        >>> call = {"name": "computer_use", "arguments": '{"action": "left_click", "coordinate": [3, 4]}'}
        >>> read_tool_call({"type": "function", "function": call})
        Click(point=(3.0, 4.0), button='left')
    """
    record = Json().read(record, where)
    if record.get("type") is not None:
        Str(("function",)).read(record["type"], f"{where}.type")
    function, at = record.get("function"), f"{where}.function"
    if function is None:
        raise trace_error(at, "is missing", "MM004")
    if not isinstance(function, dict):
        raise trace_error(at, f"expected an object, found {shown(function)}")
    unknown = function.keys() - {"name", "arguments"}
    if unknown:
        raise trace_error(at, f"has the unknown field {shown(min(unknown))}")
    name = function.get("name")
    if name is None:
        raise trace_error(f"{at}.name", "is missing", "MM004")
    Text().read(name, f"{at}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_json(arguments, f"{at}.arguments")
    more = {k: v for k, v in record.items() if k not in ("type", "function", "name", "arguments")}
    call = {"name": name, "arguments": arguments, **more}
    return read_call(call, name if name in TOOLS else "computer_use", at)


def write_tool_call(action: Action, tool: str = "computer_use") -> dict[str, Any]:
    """The record of an action, a call of `tool`: `computer_use` or `mobile_use`. A ToolCall calls its own.

    Raises: ArgumentError for an action that the tool can't do.
    """
    check_name("write_tool_call", "tool", tool, TOOLS)
    call = write_call(action, tool)
    function = {"name": call.pop("name"), "arguments": json_text(call.pop("arguments"))}
    return {**call, "type": "function", "function": function}
