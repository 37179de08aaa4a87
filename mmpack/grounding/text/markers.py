"""Places between markers, which are tokens of their own in most vocabularies.

Qwen: `<|object_ref_start|>a cat<|object_ref_end|><|box_start|>(x0,y0),(x1,y1)<|box_end|>`, four corners between
`<|quad_start|>` and `<|quad_end|>`. InternVL: `<ref>a cat</ref><box>[[x0, y0, x1, y1]]</box>`, several boxes in one
list. Agents: a point between box markers, or `<point>x y</point>`.
"""

from __future__ import annotations

import re

from mmpack.grounding.text.places import NUMBER, Malformed, Place, Span, unlike_finite, value_of

_MARK = re.compile(r"<\|(box|quad|point|object_ref)_(start|end)\|>|<(/?)(box|quad|point|ref)>")
_NUMBER = re.compile(NUMBER)
_PAIR = "(n,n)"
# what stands between the markers, blanks taken out and numbers written as n: how many numbers a place has
_SHAPES = {
    "box": {f"{_PAIR},{_PAIR}": 4, "[n,n,n,n]": 4, "n,n,n,n": 4, _PAIR: 2, "[n,n]": 2},
    "quad": {",".join([_PAIR] * 4): 8, "[n,n,n,n,n,n,n,n]": 8},
    "point": {_PAIR: 2, "[n,n]": 2, "n,n": 2, "n n": 2},
}
_LISTS = {"box": (4, 2), "quad": (8,), "point": (2,)}  # numbers of each list in a list


def read_markers(text: str) -> tuple[list[Place], list[Malformed]]:
    """Places and faults, see `read_places`. A label is that of the last reference before the box."""
    places: list[Place] = []
    wrong: list[Malformed] = []
    label: str | None = None
    opened: tuple[str, int, int] | None = None  # mark, its start and stop
    for mark in _MARK.finditer(text):
        kind = mark[1] or mark[4]
        name = f"{kind}|" if mark[1] else kind  # one kind in two spellings doesn't close the other
        if mark[2] == "start" or mark[3] == "":
            if opened is not None:
                wrong.append(_unclosed(opened, mark.start()))
            opened = (name, *mark.span())
        elif opened is None or opened[0] != name:
            start = mark.start() if opened is None else opened[1]
            wrong.append(Malformed(start, mark.end(), f"{mark[0]} closes nothing"))
            opened = None
        else:
            inside = (opened[2], mark.start())
            if kind in ("object_ref", "ref"):
                label = text[slice(*inside)].strip() or None
            else:
                found, why = _read(text, kind, inside, (opened[1], mark.end()), label)
                places += found
                if why:
                    wrong.append(Malformed(opened[1], mark.end(), why))
            opened = None
    if opened is not None:
        wrong.append(_unclosed(opened, len(text)))
    return places, wrong


def _unclosed(opened: tuple[str, int, int], stop: int) -> Malformed:
    return Malformed(opened[1], stop, f"{opened[0].rstrip('|')} is opened and never closed")


def _read(
    text: str, kind: str, inside: Span, whole: Span, label: str | None
) -> tuple[list[Place], str | None]:
    """The places between two markers, or why there are none."""
    numbers = [m.span() for m in _NUMBER.finditer(text, *inside)]
    shape, size = _shape(text, inside, numbers), 0
    if shape.count("n") == len(numbers):
        size = _SHAPES[kind].get(shape, 0) or _size_in_lists(kind, shape)
    if not size:
        return [], f"a {kind} holds {text[slice(*inside)]!r:.60}"
    values = [value_of(text[slice(*span)]) for span in numbers]
    if why := unlike_finite(values):
        return [], why
    places = []
    for k in range(0, len(numbers), size):
        own, mine = tuple(numbers[k : k + size]), tuple(values[k : k + size])
        span = whole if size == len(numbers) else (own[0][0], own[-1][1])
        bbox, point, quad = None, None, None
        if size == 2:
            point = mine
        elif size == 4:
            bbox = mine
        else:
            quad = mine
            bbox = (min(mine[::2]), min(mine[1::2]), max(mine[::2]), max(mine[1::2]))
        places.append(Place(*span, "markers", bbox, point, label, own, quad))
    return places, None


def _shape(text: str, inside: Span, numbers: list[Span]) -> str:
    """The text with each number written as n, and blanks only where nothing else divides two numbers."""
    parts, at = [], inside[0]
    for start, stop in numbers:
        parts += [text[at:start], "n"]
        at = stop
    shape = " ".join("".join([*parts, text[at : inside[1]]]).split())
    for sign in "(),[]":
        shape = shape.replace(f" {sign}", sign).replace(f"{sign} ", sign)
    return shape


def _size_in_lists(kind: str, shape: str) -> int:
    """The numbers of each inner list of a list of lists that are alike; 0 if it is none."""
    for size in _LISTS[kind]:
        one = f"[{','.join('n' * size)}]"
        count = shape.count("n") // size
        if count and shape == f"[{','.join([one] * count)}]":
            return size
    return 0
