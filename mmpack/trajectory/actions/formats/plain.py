"""mmpack's own action JSON: `{"kind": "click", "point": [3, 4]}`, an object anywhere in a text, its `kind` first."""

from __future__ import annotations

import re
from typing import Any

from mmpack.schema.actions import Action, read_action
from mmpack.trajectory.actions.formats.base import Call, Format, json_text, plain_numbers
from mmpack.trajectory.actions.strict_json import end_of_json

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


def _read(value: Any, where: str) -> Action:
    return read_action(value, where)


def _write(action: Action) -> dict[str, Any]:
    written: dict[str, Any] = plain_numbers(action.to_dict())
    return written


def _place(value: Any, name: str) -> tuple[str, ...]:
    return (name,)


PLAIN = Format("json", _next_call, _read, _write, json_text, _place)
