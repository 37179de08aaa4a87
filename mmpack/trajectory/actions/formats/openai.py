"""Tool calls of OpenAI-style records: `{"id": …, "type": "function", "function": {"name": …, "arguments": "…"}}`.

A record is what a server made of a text, so that it has no tokens: `find_actions` reads the text itself.
"""

from __future__ import annotations

from typing import Any

from mmpack.errors import check_name
from mmpack.schema.actions import Action, Text
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.specs import Json, Str
from mmpack.trajectory.actions.formats.base import json_text
from mmpack.trajectory.actions.formats.qwen import TOOLS, read_call, write_call
from mmpack.trajectory.actions.strict_json import read_json


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
