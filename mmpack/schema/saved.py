"""Documents of JSON that are no traces: read up to a size, numbers within 64 bits, and built as their dataclass."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from mmpack.errors import MmpackError, one_line
from mmpack.files import read_bounded


def read_json(path: Path, most: int, finite: bool = True) -> Any:
    """The JSON of a file of at most `most` bytes. Raises: OSError, and what `parse_json` does."""
    return parse_json(read_bounded(path, most), finite)


def read_saved(path: str | Path, most: int, where: str, error: type[MmpackError], fix: str) -> Any:
    """The JSON of a file. `where` begins an error of the type `error`, and `fix` ends it."""
    try:
        return read_json(Path(path), most)
    except OSError as why:
        raise error(f"{where} can't be read: {why.strerror}. Fix: {fix}") from None
    except ValueError as why:
        raise error(f"{where} is not JSON that can be read ({why}). Fix: {fix}") from None


def parse_json(data: bytes | str, finite: bool = True) -> Any:
    """Parse JSON whose numbers fit into 64 bits.

    Args: `finite`: refuse NaN and Infinity, which are no JSON. Raises: ValueError, of one line.
    """

    def constant(name: str) -> float:
        if finite:
            raise ValueError(f"it holds {name}")
        return float(name)

    try:
        return json.loads(data, parse_int=_whole, parse_float=_real, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(one_line(str(error))[:200]) from None


def built(kind: Any, value: Any, hints: Callable[[type], dict[str, Any]] | None = None) -> Any:
    """The value of this type that parsed JSON stands for: a dataclass, a collection, text, a number.

    Args: `hints`: types of a dataclass's fields; by default what `typing` resolves. A field that is absent takes its
    default, and one without a type in `hints` too. Raises: TypeError, KeyError, ValueError for JSON of another form.
    """
    resolve = hints or typing.get_type_hints
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {type(value).__name__}")
        of_fields, out = resolve(kind), {}
        for field in fields(kind):
            if field.name in value and field.name in of_fields:
                out[field.name] = built(of_fields[field.name], value[field.name], resolve)
            elif field.default is MISSING and field.default_factory is MISSING:
                raise KeyError(f"{kind.__name__} has no {field.name}")
        return kind(**out)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return built(next(a for a in arguments if a is not type(None)), value, resolve)
    if origin is None:
        return _plain(kind, value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind} is {type(value).__name__}")
        return {_plain(arguments[0], k): built(arguments[1], v, resolve) for k, v in value.items()}
    if not isinstance(value, list | tuple):
        raise TypeError(f"{kind} is {type(value).__name__}")
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise ValueError(f"{kind} has {len(value)} values")
        return tuple(built(a, v, resolve) for a, v in zip(arguments, value, strict=True))
    return origin(built(arguments[0], v, resolve) for v in value)


def _plain(kind: Any, value: Any) -> Any:
    """Text, numbers, booleans, and anything. JSON has null for numbers that are not finite."""
    if kind is float:
        if value is None:
            return math.nan
        if type(value) in (int, float):
            return float(value)
    elif kind is Any or type(value) is kind:
        return value
    raise TypeError(f"{getattr(kind, '__name__', kind)} is {type(value).__name__}")


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"it holds {digits[:24]}…, which is beyond 64 bits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"it holds {digits:.40}, which is beyond 64 bits")
    return value
