"""Formats of actions: what a model writes, and the typed action that it means."""

from __future__ import annotations

from typing import Any

from mmpack.errors import ArgumentError, check_name, kind_of
from mmpack.schema.actions import Action
from mmpack.schema.error_text import trace_error
from mmpack.trajectory.actions.formats.base import Call, Format
from mmpack.trajectory.actions.formats.plain import PLAIN
from mmpack.trajectory.actions.formats.qwen import COMPUTER_USE, MOBILE_USE
from mmpack.trajectory.actions.strict_json import read_json

FORMATS: dict[str, Format] = {f.name: f for f in (PLAIN, COMPUTER_USE, MOBILE_USE)}

__all__ = ["FORMATS", "Call", "Format", "action_text", "get_format", "read_action", "write_action"]


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
            "Fix: pass an action of mmpack.trajectory, or what read_action returned"
        )
    return form.write(action)


def action_text(action: Action, format: str | Format = "json") -> str:
    """The call as a model writes it, with the marks of the format. Raises as `write_action` does."""
    return get_format("action_text", format).text(write_action(action, format))
