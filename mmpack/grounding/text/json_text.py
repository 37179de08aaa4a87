"""Places in JSON: objects with `bbox_2d` [x0, y0, x1, y1] or `point_2d` [x, y], anywhere in a text, in lists or alone.

Objects are read while the text is JSON; where it stops being JSON, what was complete counts, and an object that holds
one of the two keys and is not complete is a fault. Reading goes on from there, never from before.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from mmpack.grounding.text.places import Malformed, Place, Span, unlike_finite, value_of

SIZES = {"bbox_2d": 4, "point_2d": 2}
LABELS = ("label", "text_content")
# as JSON has them, and the words that Python's json takes for numbers
_NUMBER = (
    r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+|(?:NaN|-?Infinity)(?![a-zA-Z])"
)
_OPEN = re.compile(r"[\[{]")
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r\n]++)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*+"|\'(?:[^\'\\\n]|\\.)*+\')'
    rf"|(?P<number>{_NUMBER})"
    r"|(?P<sign>[\[\]{}:,])"
    r"|(?P<word>true|false|null)(?![a-zA-Z0-9_])"
)
_REST = 200  # characters after a fault within which its object may end


@dataclass
class _Frame:
    """An open object or list."""

    start: int
    is_object: bool
    expects: str  # value, key, colon, comma; value_or_end, key_or_end
    key: str | None = None
    fields: dict[str, Any] = field(
        default_factory=dict
    )  # of an object: key to value, of the keys that count
    numbers: list[tuple[float, Span]] | None = field(
        default_factory=list
    )  # of a list of numbers alone
    faults: list[str] = field(default_factory=list)

    @property
    def speaks_of_a_place(self) -> bool:
        return self.key in SIZES or any(name in self.fields for name in SIZES)


def read_json(text: str) -> tuple[list[Place], list[Malformed]]:
    """Places and faults, see `read_places`."""
    places: list[Place] = []
    wrong: list[Malformed] = []
    at = 0
    while (found := _OPEN.search(text, at)) is not None:
        at = _read(text, found.start(), places, wrong)
    return places, wrong


def _read(text: str, at: int, places: list[Place], wrong: list[Malformed]) -> int:
    """Read one value that opens at `at`; where reading goes on."""
    stack: list[_Frame] = []
    while True:
        token = _TOKEN.match(text, at)
        if token is None or not _take(token, stack, places, wrong):
            return _broken(text, at, stack, wrong)
        at = token.end()
        if not stack:
            return at


def _take(
    token: re.Match[str], stack: list[_Frame], places: list[Place], wrong: list[Malformed]
) -> bool:
    """Go on by one token. False where JSON has no such token."""
    kind, text = token.lastgroup, token[0]
    if kind == "blank":
        return True
    frame = stack[-1] if stack else None
    expects = frame.expects if frame else "value"
    if kind == "sign" and text in "]}":
        ends = expects in ("comma", "value_or_end", "key_or_end")
        if frame is None or not ends or frame.is_object != (text == "}"):
            return False
        stack.pop()
        if frame.is_object:
            _finish(frame, token.end(), places, wrong)
        if stack:
            _put(stack[-1], frame.numbers if not frame.is_object else None)
        return True
    if kind == "sign" and text in ",:":
        if frame is None or expects != {",": "comma", ":": "colon"}[text]:
            return False
        frame.expects = "key" if text == "," and frame.is_object else "value"
        return True
    if expects in ("key", "key_or_end"):
        if frame is None or kind != "string":
            return False
        frame.key, frame.expects = _string(text, frame), "colon"
        return True
    if expects not in ("value", "value_or_end"):
        return False
    if kind == "sign":
        is_object = text == "{"
        stack.append(
            _Frame(token.start(), is_object, "key_or_end" if is_object else "value_or_end")
        )
    elif frame is not None:
        value: Any = (value_of(text), token.span()) if kind == "number" else None
        _put(frame, _string(text, frame) if kind == "string" else value)
    return True


def _put(frame: _Frame, value: Any) -> None:
    """A value that is complete: a string, (number, span), a list of those or None for all else."""
    frame.expects = "comma"
    if frame.is_object:
        if frame.key in SIZES or frame.key in LABELS:
            if frame.key in frame.fields:
                frame.faults.append(f"{frame.key} is written twice")
            frame.fields[frame.key] = value
        frame.key = None
    elif frame.numbers is not None:
        longest = len(frame.numbers) > max(SIZES.values())
        frame.numbers = (
            [*frame.numbers, value] if isinstance(value, tuple) and not longest else None
        )


def _finish(frame: _Frame, stop: int, places: list[Place], wrong: list[Malformed]) -> None:
    """An object that is complete."""
    if not frame.speaks_of_a_place:
        return
    faults, parts, spans = list(frame.faults), {}, []
    for name, size in SIZES.items():
        if name not in frame.fields:
            continue
        numbers = frame.fields[name]
        if not isinstance(numbers, list) or len(numbers) != size:
            faults.append(f"{name} is not a list of {size} numbers")
            continue
        parts[name] = tuple(value for value, _ in numbers)
        spans += [span for _, span in numbers]
        if why := unlike_finite(parts[name]):
            faults.append(why)
    if faults:
        wrong.append(Malformed(frame.start, stop, faults[0]))
        return
    label = next((s for n in LABELS if isinstance(s := frame.fields.get(n), str)), None)
    places.append(
        Place(
            frame.start,
            stop,
            "json",
            parts.get("bbox_2d"),
            parts.get("point_2d"),
            label,
            tuple(spans),
        )
    )


def _broken(text: str, at: int, stack: list[_Frame], wrong: list[Malformed]) -> int:
    """The text stops being JSON at `at`: the innermost object that speaks of a place is a fault."""
    for frame in reversed(stack):
        if frame.is_object and frame.speaks_of_a_place:
            end = text.find("}", at, at + _REST)
            stop = end + 1 if end >= 0 else max(at, min(at + _REST, len(text)))
            why = (
                "ends in the middle"
                if at == len(text)
                else f"is not JSON at {text[at : at + 12]!r}"
            )
            wrong.append(Malformed(frame.start, stop, f"an object with coordinates {why}"))
            return stop
    return at


def _string(text: str, frame: _Frame) -> str:
    if text[0] == "'":
        frame.faults.append("strings in single quotes")
        return text[1:-1]
    try:
        return str(json.loads(text, strict=False))
    except ValueError:  # a wrong escape
        frame.faults.append("a string with a wrong escape")
        return text[1:-1]
