"""Records as arguments of custom ops: their fields stand once, and torch.library sees them one after the other."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, get_type_hints


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of NamedTuples as a function of their fields, in order; what it returns may be one too.

    For torch.library, which reads an op's schema from annotations and takes no records: `op(*call, *statistics)`
    runs `function(call, statistics)`. Fields of all records need different names.
    """
    annotations = get_type_hints(function)
    result = annotations.pop("return")
    records = list(annotations.values())
    stops = [sum(len(record._fields) for record in records[:i]) for i in range(1, len(records) + 1)]
    slices = list(zip(records, map(slice, [0, *stops], stops), strict=False))

    @functools.wraps(function)
    def of_fields(*values: Any) -> Any:
        return function(*(record._make(values[part]) for record, part in slices))

    fields = {name: kind for record in records for name, kind in get_type_hints(record).items()}
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    of_fields.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, positional, annotation=kind) for name, kind in fields.items()],
        return_annotation=_plain(result),
    )
    return of_fields


def _plain(result: Any) -> Any:
    """The type of what is returned; of a NamedTuple, the tuple of its fields' types."""
    if hasattr(result, "_fields"):
        return types.GenericAlias(tuple, tuple(get_type_hints(result).values()))
    return None if result is type(None) else result
