"""What an action's JSON says, whatever format it is in: its name, its points, its direction, its text.

Formats disagree about keys: every spelling is tried, since a picture must show what is there. Points are as written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("action", "action_type", "type", "kind", "name", "function")
CALLS = ("", "function", "tool_call", "tool_use")  # not what is done
FIRST = (
    "coordinate",
    "start_coordinate",
    "coordinates",
    "point",
    "position",
    "start",
    "from",
    "start_point",
)
SECOND = ("coordinate2", "end_coordinate", "end", "to", "end_point")  # fmt: skip
PAIRS = (("x", "y"), ("start_x", "start_y"), ("x1", "y1"))
SECOND_PAIRS = (("end_x", "end_y"), ("x2", "y2"))
TEXTS = (
    "text",
    "content",
    "key",
    "keys",
    "app",
    "status",
    "button",
    "direction",
    "seconds",
    "time",
    "url",
)
TEXT_MOST = 60  # characters
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}

Point = tuple[float, float]


@dataclass(frozen=True)
class Action:
    """What can be drawn of an action."""

    name: str
    points: tuple[Point, ...]  # one: a click; two or more: a path
    text: str
    direction: tuple[int, int] | None = (
        None  # of a scroll without a second point: x, y on the screen
    )

    @property
    def words(self) -> str:
        """One line."""
        where = " → ".join(f"({x:g}, {y:g})" for x, y in self.points)
        return " ".join(part for part in (self.name, where, self.text) if part)


def read_action(action: Any) -> Action:
    """Whatever can be read; never raises for JSON."""
    fields = _arguments(action)
    name = next(
        (v for k in NAMES if isinstance(v := fields.get(k), str) and v not in CALLS), "action"
    )
    first, second = _point_of(fields, FIRST, PAIRS), _point_of(fields, SECOND, SECOND_PAIRS)
    path = fields.get("path")
    if isinstance(path, list):
        points = [p for p in map(_point, path) if p is not None]
    else:
        points = [p for p in (first, second) if p is not None]
    words = [f"{_text(fields[k])}" for k in TEXTS if fields.get(k) not in (None, "", [])]
    return Action(name, tuple(points), ", ".join(words), _direction(name, fields))


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


def _direction(name: str, fields: dict[str, Any]) -> tuple[int, int] | None:
    """Where the view moves: a word, or the sign of `pixels` (Qwen's computer_use: positive is up)."""
    if "scroll" not in name and name != "swipe":
        return None
    word = fields.get("direction")
    if isinstance(word, str) and word in DIRECTIONS:
        return DIRECTIONS[word]
    steps = {k: fields.get(k) for k in ("pixels", "dx", "dy")}
    known = {k: v for k, v in steps.items() if type(v) in (int, float) and v}
    if "pixels" in known:
        sign = -1 if known["pixels"] > 0 else 1
        return (sign, 0) if name == "hscroll" else (0, sign)
    if "dy" in known:
        return (0, 1 if known["dy"] > 0 else -1)
    return (1 if known["dx"] > 0 else -1, 0) if "dx" in known else None


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= TEXT_MOST else f"{text[: TEXT_MOST - 1]}…"
