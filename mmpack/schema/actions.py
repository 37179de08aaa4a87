"""Actions on a screen, typed: what `ActionSpan.action` holds where it has a `kind`.

Points are x, y in the sample's coordinate system. A point that is None is where the cursor is. Seconds are seconds;
scrolling is in the unit of the environment, to the right and down where above 0. Unknown fields are kept in `metadata`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from mmpack.errors import ArgumentError, TraceError
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.fields import Record, column
from mmpack.schema.specs import Float, Floats, Json, Spec, Str

BUTTONS = ("left", "right", "middle")
MODIFIERS = ("alt", "ctrl", "meta", "shift")
SYSTEM_BUTTONS = ("back", "home", "menu", "enter")
STATUSES = ("success", "failure")
Point = tuple[float, ...]
_SURROGATE = re.compile("[\ud800-\udfff]")


class Text(Str):
    """A string that can be typed: no lone surrogate."""

    def read(self, value: Any, where: str) -> str:
        text = super().read(value, where)
        if not _is_unicode(text):
            raise trace_error(where, "holds a lone surrogate, which is not a character")
        return text

    def holds(self, value: Any) -> bool:
        return super().holds(value) and _is_unicode(value)


@dataclass(frozen=True)
class Names(Spec):
    """A tuple of at least `least` names, none of them empty."""

    choices: tuple[str, ...] = ()
    least: int = 0

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise trace_error(where, f"expected an array of strings, found {shown(value)}")
        if len(value) < self.least:
            raise trace_error(where, "is empty")
        out = tuple(Text(self.choices).read(v, f"{where}[{i}]") for i, v in enumerate(value))
        if "" in out:
            raise trace_error(f"{where}[{out.index('')}]", "is empty")
        return out

    def holds(self, value: Any) -> bool:
        return (
            type(value) is tuple
            and len(value) >= self.least
            and all(v and Text(self.choices).holds(v) for v in value)
        )

    def write(self, value: Any, numpy: bool) -> Any:
        return list(value) if isinstance(value, tuple) else value

    def schema(self) -> dict[str, Any]:
        item = {"type": "string", "minLength": 1} | Text(self.choices).schema()
        return {"type": "array", "items": item} | ({"minItems": self.least} if self.least else {})


class Seconds(Float):
    """A duration: 0 or more."""

    def read(self, value: Any, where: str) -> float:
        seconds = super().read(value, where)
        if seconds < 0:
            raise trace_error(where, f"{seconds:g} seconds, expected 0 or more")
        return seconds

    def holds(self, value: Any) -> bool:
        return super().holds(value) and value >= 0

    def schema(self) -> dict[str, Any]:
        return super().schema() | {"minimum": 0}


class Action(Record):
    """Base of the actions below, which are frozen and checked when they are made (ArgumentError).

    Example:
        >>> from mmpack.schema.actions import Click, read_action
        >>> Click((3, 4)).to_dict()
        {'kind': 'click', 'point': [3.0, 4.0], 'button': 'left'}
        >>> read_action({"kind": "wait", "seconds": 2, "why": "slow"})
        Wait(seconds=2.0, metadata={'why': 'slow'})
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        faults: list[TraceError] = []
        name = type(self).__name__
        for field, declared in self.columns().items():
            value = getattr(self, field)
            if value is None and declared.required:
                faults.append(trace_error(field, "is missing", "MM004"))
            elif value is not None and not declared.spec.holds(value):
                object.__setattr__(self, field, declared.spec.checked(value, field, faults))
        for fault in faults:
            raise ArgumentError(f"{name}: {fault.where} {fault.why}. Fix: {_FIX}")
        if self.lacks():
            raise ArgumentError(f"{name}: {self.lacks()}. Fix: {_FIX}")

    def lacks(self) -> str:
        """Say what an action lacks beyond its required fields; empty if nothing."""
        return ""

    def points(self) -> dict[str, Point]:
        """The points of the action, by field."""
        values = {name: getattr(self, name) for name in ("point", "to") if hasattr(self, name)}
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self, numpy: bool = False) -> dict[str, Any]:
        """The action as JSON values, its `kind` first and empty lists left out; `read_action` reads it."""
        written = super().to_dict(numpy)
        return {"kind": self.kind} | {k: v for k, v in written.items() if v != []}

    def __repr__(self) -> str:
        set_ = [(n, getattr(self, n)) for n in self.columns()]
        inside = ", ".join(f"{n}={v!r}" for n, v in set_ if v not in (None, (), {}))
        return f"{type(self).__name__}({inside})"


_FIX = "pass what action.schema.json says of this kind"


def _point(doc: str) -> Any:
    return column(Floats(2), doc, None)


def _to() -> Any:
    return column(Floats(2), "x, y where it ends")


def _button() -> Any:
    return column(Str(BUTTONS), "which button", "left")


def _modifiers() -> Any:
    return column(Names(MODIFIERS), "keys that are held down", ())


def _extra() -> Any:
    return column(Json(), "unknown fields, carried through", factory=dict)


_AT = "x, y; the cursor's place if absent"


@dataclass(frozen=True, eq=False, repr=False)
class Click(Action):
    """Press and release a button of the mouse once, or tap."""

    kind = "click"
    point: Point | None = _point(_AT)
    button: str = _button()
    modifiers: tuple[str, ...] = _modifiers()
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class DoubleClick(Action):
    """Click twice."""

    kind = "double_click"
    point: Point | None = _point(_AT)
    modifiers: tuple[str, ...] = _modifiers()
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class TripleClick(Action):
    """Click three times."""

    kind = "triple_click"
    point: Point | None = _point(_AT)
    modifiers: tuple[str, ...] = _modifiers()
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Move(Action):
    """Move the cursor."""

    kind = "move"
    point: Point = column(Floats(2), "x, y")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class LongPress(Action):
    """Touch and hold."""

    kind = "long_press"
    point: Point = column(Floats(2), "x, y")
    seconds: float | None = column(Seconds(), "how long", None)
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Drag(Action):
    """Press a button, move, release it."""

    kind = "drag"
    to: Point = _to()
    point: Point | None = _point("x, y where it begins; the cursor's place if absent")
    button: str = _button()
    modifiers: tuple[str, ...] = _modifiers()
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Swipe(Action):
    """Touch, move, let go."""

    kind = "swipe"
    point: Point = column(Floats(2), "x, y where it begins")
    to: Point = _to()
    seconds: float | None = column(Seconds(), "how long", None)
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Scroll(Action):
    """Turn the wheel, by `dx`, `dy` or both."""

    kind = "scroll"
    dx: float | None = column(Float(), "to the right", None)
    dy: float | None = column(Float(), "down", None)
    point: Point | None = _point(_AT)
    modifiers: tuple[str, ...] = _modifiers()
    metadata: dict[str, Any] = _extra()

    def lacks(self) -> str:
        return "dx and dy are missing" if self.dx is None and self.dy is None else ""


@dataclass(frozen=True, eq=False, repr=False)
class Type(Action):
    """Type a text."""

    kind = "type"
    text: str = column(Text(), "what is typed")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Key(Action):
    """Press keys in this order, then release them in reverse order."""

    kind = "key"
    keys: tuple[str, ...] = column(Names(least=1), "names of keys")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class SystemButton(Action):
    """Press a button of a phone."""

    kind = "system_button"
    button: str = column(Str(SYSTEM_BUTTONS), "which button")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class OpenApp(Action):
    """Open an app."""

    kind = "open_app"
    app: str = column(Text(), "its name")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Wait(Action):
    """Do nothing for a while."""

    kind = "wait"
    seconds: float = column(Seconds(), "how long")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Terminate(Action):
    """End the episode."""

    kind = "terminate"
    status: str = column(Str(STATUSES), "how the policy says that it went")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Action):
    """Answer the user."""

    kind = "answer"
    text: str = column(Text(), "the answer")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True, eq=False, repr=False)
class ToolCall(Action):
    """Call a tool that is no screen."""

    kind = "tool_call"
    name: str = column(Text(), "the tool")
    arguments: dict[str, Any] = column(Json(), "what it is called with")
    metadata: dict[str, Any] = _extra()


ACTIONS: dict[str, type[Action]] = {
    cls.kind: cls
    for cls in (
        *(Click, DoubleClick, TripleClick, Move, LongPress, Drag, Swipe, Scroll, Type, Key),
        *(SystemButton, OpenApp, Wait, Terminate, Answer, ToolCall),
    )
}


def read_action(value: Any, where: str = "action") -> Action:
    """The typed action of parsed JSON with a `kind`. Raises TraceError; `where` begins its message."""
    if not isinstance(value, dict):
        raise trace_error(where, f"expected an object, found {shown(value)}")
    if not all(isinstance(key, str) for key in value):
        raise trace_error(where, "holds a key that is not a string")
    kind = Text().read(value["kind"], f"{where}.kind") if "kind" in value else None
    if kind is None:
        raise trace_error(f"{where}.kind", "is missing", "MM004")
    if kind not in ACTIONS:
        raise trace_error(f"{where}.kind", f"{shown(kind)} is none of {', '.join(ACTIONS)}")
    return make_action(ACTIONS[kind], {k: v for k, v in value.items() if k != "kind"}, where)


def make_action(cls: type[Action], fields: dict[str, Any], where: str) -> Action:
    """An action of `cls` from JSON values of its fields. Raises TraceError."""
    try:
        made: Action = cls.from_dict(fields, where)
    except ArgumentError as error:  # what it `lacks`
        raise trace_error(
            where, str(error).partition(": ")[2].rpartition(". Fix: ")[0], "MM004"
        ) from None
    return made


def _is_unicode(text: str) -> bool:
    return _SURROGATE.search(text) is None
