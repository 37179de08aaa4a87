"""Boxes, points and actions of a sample as marks on its media.

A mark's points are fractions of the picture: x, y in [0, 1] from the upper left corner; those outside stay outside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmpack.errors import ArgumentError, TraceError
from mmpack.families import FAMILIES
from mmpack.grounding import Sizes, convert, sizes_of, system_of
from mmpack.schema import actions as schema
from mmpack.schema.rules.actions import Screens
from mmpack.schema.sample import Sample
from mmpack.trajectory import read_action as read_in_format
from mmpack.trajectory import read_tool_call

Scales = list[tuple[str, Sizes] | None]  # of each medium: the system of its places, and the sizes
REACH = 0.18  # of the picture: the length of a scroll's arrow


@dataclass(frozen=True)
class PlacedMark:
    """A mark on a drawing, in its units; points outside lie at its edge."""

    x: float  # of the click, or of a box's upper left corner
    y: float
    width: float  # of a box
    height: float
    lines: list[list[Point]]  # of a path: itself, and the two strokes of its head
    label: Point  # where its letter begins


@dataclass(frozen=True)
class Mark:
    """Something drawn on a medium."""

    media_index: int
    shape: str  # "box", "point", "click", "path"
    points: tuple[Point, ...]  # a box: its upper left and lower right corner
    letter: str  # drawn next to it: "r0" a region, "t0" a target, "1" an action
    text: str
    role: str  # "region", "target", "action"
    token: int | None = None  # the first that it comes from

    @property
    def outside(self) -> bool:
        """Whether a point lies beyond the picture (a pixel's rounding aside)."""
        return any(not (-2e-3 <= v <= 1 + 2e-3) for point in self.points for v in point)

    def placed(self, width: float, height: float) -> PlacedMark:
        """The mark on a drawing of this size."""
        points = [
            (min(max(x, 0.0), 1.0) * width, min(max(y, 0.0), 1.0) * height) for x, y in self.points
        ]
        (x, y), (x1, y1) = points[0], points[-1]
        lines = [points, *_head(points)] if self.shape == "path" else []
        wide, high = max(x1 - x, 1.0), max(y1 - y, 1.0)
        return PlacedMark(x, y, wide, high, lines, self._label(points, width, height))

    def _label(self, points: list[Point], width: float, height: float) -> Point:
        """Where the letter begins: above a box, to the right of a click; within the drawing.

        A point of a region is mostly that of a click: its letter stands lower, so that "1" and "r0" don't read "10".
        """
        (x, y), room = points[0], 7.0 * len(self.letter) + 5
        if self.shape == "box":
            x = points[1][0] - room + 4 if self.role == "target" else x + 1
            y = y - 4 if y > 16 else points[1][1] + 13
        else:
            x = x + 11 if x + 11 + room < width else x - 11 - room
            y = y - 8 if self.role == "action" else y + 16
        return min(max(x, 2.0), max(width - room, 2.0)), min(max(y, 12.0), height - 3)


def _head(points: list[Point], length: float = 10.0) -> list[list[Point]]:
    """Two strokes from the last point of a path backwards."""
    (x0, y0), (x1, y1) = points[-2], points[-1]
    angle = math.atan2(y1 - y0, x1 - x0)
    return [
        [(x1, y1), (x1 - length * math.cos(angle + turn), y1 - length * math.sin(angle + turn))]
        for turn in (0.5, -0.5)
    ]


def marks_of(sample: Sample) -> list[Mark]:
    """Regions, targets, then actions, of media that are there. Numbers that are not finite are not drawn."""
    scales = [_read(sample, i) for i in range(len(sample.media))]
    placed = [_placed(mark, direction, scales) for mark, direction in _written(sample)]
    return [mark for mark in placed if mark is not None]


def _written(sample: Sample) -> Iterator[tuple[Mark, tuple[int, int] | None]]:
    """Marks whose points are as the sample writes them, and the direction of an action."""
    for i, region in enumerate(sample.region_spans or ()):
        about: Any = (f"r{i}", region.label or "region", "region", region.start)
        yield from ((mark, None) for mark in _of_place(region, region.media_index, about))
    targets: list[Any] = [*(sample.bbox_targets or ()), *(sample.point_targets or ())]
    for i, target in enumerate(targets):
        index = target.media_index
        index = _last_medium(sample, len(sample)) if index is None else index
        about = (f"t{i}", target.label or "target", "target", None)
        yield from ((mark, None) for mark in _of_place(target, index, about))
    screens = Screens(sample, FAMILIES[sample.family])
    for i, span in enumerate(sample.action_spans or ()):
        action = drawn_action(span.action)
        index = screens.before(span.start)
        index = _last_medium(sample, span.start) if index is None else index
        shape = "path" if len(action.points) > 1 else "click"
        about = (str(i + 1), action.words, "action", span.start)
        if index is not None and action.points:
            direction = action.direction if shape == "click" else None
            yield Mark(index, shape, action.points, *about), direction


def _of_place(place: Any, index: int | None, about: Any) -> Iterator[Mark]:
    """The box and the point of a region or a target."""
    bbox, point = getattr(place, "bbox", None), getattr(place, "point", None)
    if index is not None and bbox is not None:
        yield Mark(index, "box", ((bbox[0], bbox[1]), (bbox[2], bbox[3])), *about)
    if index is not None and point is not None:
        yield Mark(index, "point", (point,), *about)


def _placed(mark: Mark, direction: tuple[int, int] | None, scales: Scales) -> Mark | None:
    """The mark in fractions of its picture; an action's direction becomes an arrow."""
    read = scales[mark.media_index] if 0 <= mark.media_index < len(scales) else None
    if read is None or not all(math.isfinite(v) for point in mark.points for v in point):
        return None
    points = [_fraction(point, *read) for point in mark.points]
    if mark.shape == "box":  # corners in order, as far as a picture goes
        (x0, y0), (x1, y1) = points
        points = [(min(x0, x1), min(y0, y1)), (max(x0, x1), max(y0, y1))]
    elif direction is not None:
        (x, y), (dx, dy) = points[0], direction
        points.append((x + dx * REACH, y + dy * REACH))
    return replace(mark, points=tuple(points), shape="path" if direction else mark.shape)


def system_read(sample: Sample) -> str | None:
    """The coordinate system that places are read in: the sample's, else what its family writes, if that is known."""
    return sample.coordinate_system or system_of(sample.family)


def sizes_read(sample: Sample, media_index: int) -> Sizes | None:
    """What places on a medium are pixels of; None where nothing says it.

    Absolute pixels are of the picture as the model saw it. Where a number of the sample lies beyond that and the screen
    is larger, they are of the screen.
    """
    found = sizes_of(sample, media_index)
    if system_read(sample) != "absolute_pixels":
        return found
    seen = found.model or found.original  # tiles: how they lie is not recorded
    screen = sample.screen_size
    if screen is not None and min(screen) > 0 and seen is not None:
        most = [max(values, default=0.0) for values in _numbers(sample)]
        if most[0] > seen[0] or most[1] > seen[1]:
            seen = screen
    return None if seen is None else Sizes(model=seen)


def _read(sample: Sample, media_index: int) -> tuple[str, Sizes] | None:
    system, sizes = system_read(sample), sizes_read(sample, media_index)
    return None if system is None or sizes is None else (system, sizes)


def _fraction(point: Point, system: str, sizes: Sizes) -> Point:
    x, y = map(float, convert(point, system, "normalized_1", sizes))
    return x, y


def _last_medium(sample: Sample, before: int) -> int | None:
    """The medium whose placeholders were the last to begin before a token; the first medium where none did."""
    begun = [(s.start, s.media_index) for s in sample.modality_spans if s.start < before]
    if begun:
        return max(begun)[1]
    return 0 if sample.media else None


def _numbers(sample: Sample) -> tuple[list[float], list[float]]:
    """Every x and every y that the sample writes of places."""
    xs: list[float] = []
    ys: list[float] = []
    regions, boxes = sample.region_spans or [], sample.bbox_targets or []
    for box in [r.bbox for r in regions if r.bbox] + [t.bbox for t in boxes]:
        xs += [box[0], box[2]]
        ys += [box[1], box[3]]
    points = [r.point for r in regions if r.point] + [t.point for t in sample.point_targets or ()]
    points += [p for span in sample.action_spans or () for p in drawn_action(span.action).points]  # type: ignore[misc]
    for x, y in points:
        xs.append(x)
        ys.append(y)
    return xs, ys


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


# ---- actions in any spelling ---------------------------------------------------------------------


def drawn_action(action: Any) -> DrawnAction:
    """Whatever can be read; never raises for JSON."""
    known = _known(action)
    fields = _arguments(action) if known is None else known.to_dict()
    name = next(
        (v for k in NAMES if isinstance(v := fields.get(k), str) and v not in CALLS), "action"
    )
    first, second = _point_of(fields, FIRST, PAIRS), _point_of(fields, SECOND, SECOND_PAIRS)
    path = fields.get("path")
    tried = map(_point, path) if isinstance(path, list) else (first, second)
    points = tuple(point for point in tried if point is not None)
    words = [_text(fields[k]) for k in TEXTS if fields.get(k) not in (None, "", [])]
    if known is not None and fields.get("button") == "left":
        words.remove("left")
    direction = None
    if isinstance(known, schema.Scroll):
        direction = _along(known.dx or 0.0, known.dy or 0.0)
    elif "scroll" in name or name == "swipe":
        word = fields.get("direction")
        direction = DIRECTIONS.get(word) if isinstance(word, str) else None
    return DrawnAction(name, points, ", ".join(words), direction)


def _along(dx: float, dy: float) -> tuple[int, int] | None:
    """The longer way."""
    if not (dx or dy):
        return None
    return (0, 1 if dy > 0 else -1) if abs(dy) >= abs(dx) else (1 if dx > 0 else -1, 0)


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
