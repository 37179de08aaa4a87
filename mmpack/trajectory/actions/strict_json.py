"""JSON as models write it, read strictly: one value of bounded depth, no name twice in an object, no NaN; and where in
the text each value stands.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NoReturn

from mmpack.errors import TraceError
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.plain_json import MAX_DEPTH

Path = tuple[str | int, ...]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]|"', re.DOTALL)


def read_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises: TraceError (MM211) for text that is none, of any kind and length."""
    if end_of_json(text, 0)[1] > MAX_DEPTH:
        raise trace_error(where, f"is nested deeper than {MAX_DEPTH} levels", "MM211")

    def no_constant(name: str) -> NoReturn:
        raise trace_error(where, f"holds {name}, which JSON does not have", "MM211")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise trace_error(where, f"says {shown(twice)} twice", "MM211")
        return made

    try:
        return json.loads(text, parse_constant=no_constant, object_pairs_hook=once)
    except TraceError:
        raise
    except json.JSONDecodeError as error:
        why = f"is not JSON at character {error.pos}: {error.msg}"
    except ValueError:  # Python reads no integer of more than some thousand digits
        why = "holds a number of too many digits"
    raise trace_error(where, why, "MM211")


def end_of_json(text: str, start: int) -> tuple[int, int]:
    """Return one past the bracket that closes the one at `start` (-1 if none does), and the depth within.

    Brackets in strings don't count, and of which kind they are neither. Linear in what is read.
    """
    depth = most = 0
    for match in _BRACKET.finditer(text, start):
        mark = match.group()
        if mark == '"':  # a string without an end
            break
        if mark in "[{":
            depth += 1
            most = max(most, depth)
        elif mark in "]}":
            depth -= 1
            if depth <= 0:
                return match.end(), most
    return -1, most


def places(text: str) -> dict[Path, tuple[int, int]]:
    """[start, stop) in `text`, which `read_json` reads, of each value: by the names and indices that lead to it.

    Example:
        >>> from mmpack.trajectory.actions.strict_json import places
        >>> places('{"at": [10, 2]}')[("at",)], places('{"at": [10, 2]}')[("at", 1)]
        ((7, 14), (12, 13))
    """
    out: dict[Path, tuple[int, int]] = {}
    path: list[str | int] = []
    begun: list[int] = []  # of the brackets that are open
    named = False  # whether the next string names a member

    def close(start: int, stop: int) -> None:
        out[tuple(path)] = (start, stop)

    for match in _TOKEN.finditer(text):
        mark, start, stop = match.group(), match.start(), match.end()
        if mark in ("{", "["):
            begun.append(start)
            path.append("" if mark == "{" else 0)
            named = mark == "{"
        elif mark in ("}", "]"):
            path.pop()
            close(begun.pop(), stop)
        elif mark == ",":
            last = path[-1]
            named = isinstance(last, str)
            path[-1] = "" if isinstance(last, str) else last + 1
        elif mark == ":":
            named = False
        elif named:
            path[-1] = json.loads(mark)
        else:
            close(start, stop)
    return out
