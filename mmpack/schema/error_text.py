"""How errors and reprs show what is in a record: one line, escaped and cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmpack.errors import TraceError
from mmpack.schema.codes import RULES


def trace_error(where: str, message: str, code: str = "MM003") -> TraceError:
    """The error of a record that breaks rule `code` at `where`: one line, with the rule's fix."""
    return TraceError(f"{where}: {message} ({code}). Fix: {RULES[code].fix}", code, where, message)


def escaped(text: str) -> str:
    """A name from a file, safe to print: escaped and cut if it is long or breaks a line."""
    return text if text.isprintable() and len(text) <= 80 else ascii(text[:60])


def shown(value: Any) -> str:
    """A short, single-line form of a value, for error messages."""
    if isinstance(value, (list, dict)):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**128:
        return "a huge integer"
    if not isinstance(value, (str, int, float, type(None))):
        return f"a value of type {type(value).__name__}"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def safe_repr(part: Callable[[], str]) -> str:
    """A part of a repr, cut; `?` if it raises, so that a broken object has a repr too."""
    try:
        text = part()
    except Exception:  # of a foreign object, which may raise anything
        return "?"
    return text if len(text) <= 80 else text[:77] + "..."
