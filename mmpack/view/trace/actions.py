"""What can be drawn of an action: its name, its points, its direction, its text.

Actions that mmpack knows, typed or as Qwen's tools write them, are read as such. Of others the common spellings are
tried, since a picture must show what is there. Points are as written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmpack.errors import ArgumentError, TraceError
from mmpack.schema import actions as schema
from mmpack.trajectory import read_action as read_in_format
from mmpack.trajectory import read_tool_call

NAMES = ("action", "action_type", "type", "kind", "name", "function")
CALLS = ("", "function", "tool_call", "tool_use")  # not what is done
FIRST = (
    *("coordinate", "start_coordinate", "coordinates", "point"),
    *("position", "start", "from", "start_point"),
)
SECOND = ("coordinate2", "end_coordinate", "end", "to", "end_point")
PAIRS = (("x", "y"), ("start_x", "start_y"), ("x1", "y1"))
SECOND_PAIRS = (("end_x", "end_y"), ("x2", "y2"))
TEXTS = (
    *("text", "content", "key", "keys", "app", "status", "button"),
    *("direction", "seconds", "time", "url"),
)
TEXT_MOST = 60  # characters
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}

Point = tuple[float, float]


@dataclass(frozen=True)
class DrawnAction:
    """What can be drawn of an action."""

    name: str
    points: tuple[Point, ...]  # one: a click; two or more: a path
    text: str
    # of a scroll or a swipe without a second point: x, y on the screen
    direction: tuple[int, int] | None = None

    @property
    def words(self) -> str:
        """One line."""
        where = " → ".join(f"({x:g}, {y:g})" for x, y in self.points)
        return " ".join(part for part in (self.name, where, self.text) if part)


def drawn_action(action: Any) -> DrawnAction:
    """Whatever can be read; never raises for JSON."""
    known = _known(action)
    return _spelt(_arguments(action)) if known is None else _typed(known)


# ---- actions that mmpack knows -------------------------------------------------------------------


def _known(action: Any) -> schema.Action | None:
    """The typed action; None for one of a vocabulary that mmpack doesn't know, and for a tool that is no screen."""
    if not isinstance(action, Mapping):
        return None
    value = dict(action)
    try:
        if "kind" in value:
            found = schema.read_action(value)
        elif "function" in value:
            found = read_tool_call(value)
        else:
            found = read_in_format(value, str(value.get("name")))
    except (TraceError, ArgumentError):
        return None
    return None if isinstance(found, schema.ToolCall) else found


def _typed(action: schema.Action) -> DrawnAction:
    fields = action.to_dict()
    points = tuple((point[0], point[1]) for point in action.points().values())
    usual = {"button": "left"}
    words = [_text(fields[k]) for k in TEXTS if k in fields and fields[k] != usual.get(k)]
    direction = None
    if isinstance(action, schema.Scroll):
        dx, dy = action.dx or 0.0, action.dy or 0.0
        direction = _signs(dx, dy) if dx or dy else None
    return DrawnAction(action.kind, points, ", ".join(words), direction)


def _signs(dx: float, dy: float) -> tuple[int, int]:
    """Along the longer way."""
    return (0, 1 if dy > 0 else -1) if abs(dy) >= abs(dx) else (1 if dx > 0 else -1, 0)


# ---- actions in any spelling ---------------------------------------------------------------------


def _spelt(fields: dict[str, Any]) -> DrawnAction:
    name = next(
        (v for k in NAMES if isinstance(v := fields.get(k), str) and v not in CALLS), "action"
    )
    first, second = _point_of(fields, FIRST, PAIRS), _point_of(fields, SECOND, SECOND_PAIRS)
    path = fields.get("path")
    tried = map(_point, path) if isinstance(path, list) else (first, second)
    points = tuple(point for point in tried if point is not None)
    words = [_text(fields[k]) for k in TEXTS if fields.get(k) not in (None, "", [])]
    word = fields.get("direction")
    direction = None
    if ("scroll" in name or name == "swipe") and isinstance(word, str):
        direction = DIRECTIONS.get(word)
    return DrawnAction(name, points, ", ".join(words), direction)


def _arguments(action: Any) -> dict[str, Any]:
    """The innermost arguments of a tool call, over what stands around them."""
    out: dict[str, Any] = {}
    for _ in range(4):
        if isinstance(action, str):
            try:
                action = json.loads(action)
            except (ValueError, RecursionError):
                break
        if not isinstance(action, Mapping):
            break
        out |= {str(k): v for k, v in action.items()}
        inner = [action.get(k) for k in ("arguments", "function", "action", "parameters")]
        action = next(
            (v for v in inner if isinstance(v, Mapping) or (isinstance(v, str) and "{" in v)), None
        )
    return out


def _point_of(
    fields: dict[str, Any], keys: tuple[str, ...], pairs: tuple[tuple[str, str], ...]
) -> Point | None:
    tried = [_point(fields[k]) for k in keys if k in fields]
    tried += [_point([fields[x], fields[y]]) for x, y in pairs if x in fields and y in fields]
    return next((p for p in tried if p is not None), None)


def _point(value: Any) -> Point | None:
    """[x, y], {"x": …, "y": …}, or the middle of [x0, y0, x1, y1]; None for anything else, NaN included."""
    if isinstance(value, Mapping):
        value = [value.get("x"), value.get("y")]
    if not isinstance(value, list | tuple) or len(value) not in (2, 4):
        return None
    numbers = [float(v) for v in value if type(v) in (int, float) and abs(v) < 1e15]
    if len(numbers) != len(value) or not all(map(math.isfinite, numbers)):
        return None
    half = len(numbers) // 4  # 1 of a box
    x, y = (
        (numbers[0], numbers[1])
        if not half
        else ((numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2)
    )
    return x, y


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= TEXT_MOST else f"{text[: TEXT_MOST - 1]}…"
