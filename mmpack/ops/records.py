"""Records as arguments of custom ops: their fields stand once, and torch.library sees them one after the other.

`flat` makes the function that an op runs, `schema` what torch.library is told about it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

Size = Annotated[int, "SymInt"]  # an int that torch.compile may leave open
SCHEMA_TYPES = {
    Tensor: "Tensor",
    torch.dtype: "ScalarType",
    bool: "bool",
    float: "float",
    int: "int",
    Size: "SymInt",
    str: "str",
}


def flat(
    function: Callable[..., Any], kinds: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`function` of NamedTuples as a function of their fields, in order; other arguments stay one value each.

    For torch.library, which takes no records: `op(*call, *statistics)` runs `function(call, statistics)`. Fields of all
    records need different names. `kinds`: the types of arguments and result by name, where the function is not
    annotated with them.
    """
    annotations = dict(kinds or get_type_hints(function))
    result = annotations.pop("return")
    fields: dict[str, Any] = {}
    parts: list[tuple[Any, int, int]] = []
    for name, kind in annotations.items():
        start, record = len(fields), hasattr(kind, "_fields")
        fields |= get_type_hints(kind) if record else {name: kind}
        parts.append((kind._make if record else itemgetter(0), start, len(fields)))
    if len(parts) == len(fields):
        return function

    @functools.wraps(function)
    def of_fields(*values: Any) -> Any:
        # a list, not a generator: less host time per call
        return function(*[make(values[i:j]) for make, i, j in parts])

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    of_fields.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, positional, annotation=kind) for name, kind in fields.items()],
        return_annotation=_plain(result),
    )
    return of_fields


def schema(name: str, kinds: Mapping[str, Any]) -> str:
    """The schema of an op of these arguments and result, with the fields of records one by one."""
    fields: dict[str, Any] = {}
    for argument, kind in kinds.items():
        record = hasattr(kind, "_fields")
        fields |= get_type_hints(kind, include_extras=True) if record else {argument: kind}
    result = fields.pop("return")
    several = get_origin(result) is tuple
    results = ", ".join(map(_schema_type, get_args(result) if several else [result]))
    parameters = ", ".join(f"{_schema_type(kind)} {field}" for field, kind in fields.items())
    return f"{name}({parameters}) -> {f'({results})' if several else results}"


def _plain(result: Any) -> Any:
    """The type of what is returned; of a NamedTuple, the tuple of its fields' types."""
    if hasattr(result, "_fields"):
        return types.GenericAlias(tuple, tuple(get_type_hints(result).values()))
    return None if result is type(None) else result


def _schema_type(kind: Any) -> str:
    """How a schema writes the type of a field."""
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (part for part in get_args(kind) if part is not NoneType)
        return f"{_schema_type(inner)}?"
    if get_origin(kind) in (Sequence, list):
        return f"{_schema_type(get_args(kind)[0])}[]"
    return "str" if get_origin(kind) is Literal else SCHEMA_TYPES[kind]
