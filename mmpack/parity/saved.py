"""A report and its drift out of JSON, as `ParityReport.to_json` and `mmpack parity --format json` write them."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, one_line
from mmpack.files import read_bounded
from mmpack.parity.drift import LogprobDrift
from mmpack.parity.report import ParityReport

MAX_FILE = 2**30  # bytes
FIX = "Fix: name a file that `mmpack parity A B --out FILE` wrote"
UNSAVED = ("pairs",)  # fields of a report that its JSON doesn't hold


def read_report(path: str | Path) -> tuple[ParityReport, LogprobDrift | None]:
    """The report of a file, and its drift where both sides had logprobs.

    The report has no `pairs`: samples are in the traces alone. Raises: ArgumentError for a file that holds no report.

    Example:
        >>> import mmpack as mp, tempfile, pathlib
        >>> from mmpack.parity.saved import read_report
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "report.json"
        >>> _ = path.write_text(mp.compare([], []).to_json())
        >>> read_report(path)[0].summary()
        'parity NOT ok: 0 samples compared, 0 findings'
    """
    where = f"read_report: {path}"
    try:
        document = json.loads(read_bounded(Path(path), MAX_FILE))
    except OSError as error:
        raise ArgumentError(f"{where} can't be read: {error.strerror}. {FIX}") from None
    except (ValueError, RecursionError):
        raise ArgumentError(f"{where} is not JSON. {FIX}") from None
    return report_of(document, where)


def report_of(document: Any, where: str) -> tuple[ParityReport, LogprobDrift | None]:
    """The same of a parsed file; `where` begins an error."""
    if not is_report(document):
        raise ArgumentError(f"{where} holds no parity report. {FIX}")
    try:
        report = _built(ParityReport, document)
        drift = document.get("drift")
        found = _built(LogprobDrift, drift) if drift and "tokens" in drift else None
    except (KeyError, TypeError, ValueError) as error:
        why = one_line(str(error))[:200]
        raise ArgumentError(f"{where} is damaged ({why}). {FIX}") from None
    return report, found


def is_report(document: Any) -> bool:
    """Whether a parsed file says that it is a report: it has a verdict, its findings and their causes."""
    return (
        isinstance(document, dict) and {"ok", "compared", "findings", "causes"} <= document.keys()
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields; Sample is named where it is not imported."""
    names = {"Sample": object, "Callable": typing.Callable, "FrameDifference": _frames()}
    return typing.get_type_hints(kind, localns=names)


def _frames() -> Any:
    from mmpack.parity.frame_difference import FrameDifference

    return FrameDifference


def _built(kind: Any, value: Any) -> Any:
    """A value of this type. Raises: TypeError, KeyError, ValueError for another."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {type(value).__name__}")
        hints, out = _hints(kind), {}
        for field in fields(kind):
            if field.name in UNSAVED:
                continue
            if field.name in value:
                out[field.name] = _built(hints[field.name], value[field.name])
            elif field.default is MISSING and field.default_factory is MISSING:
                raise KeyError(f"{kind.__name__} has no {field.name}")
        return kind(**out)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _built(next(a for a in arguments if a is not type(None)), value)
    if origin is None:
        return _plain(kind, value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind} is {type(value).__name__}")
        return {_plain(arguments[0], k): _built(arguments[1], v) for k, v in value.items()}
    if not isinstance(value, list | tuple):
        raise TypeError(f"{kind} is {type(value).__name__}")
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise ValueError(f"{kind} has {len(value)} values")
        return tuple(_built(a, v) for a, v in zip(arguments, value, strict=True))
    return origin(_built(arguments[0], v) for v in value)


def _plain(kind: Any, value: Any) -> Any:
    """Text, numbers, booleans, and anything. JSON has null for numbers that are not finite."""
    if kind is float:
        if value is None:
            return float("nan")
        if type(value) in (int, float):
            return float(value)
    elif kind is Any or type(value) is kind:
        return value
    raise TypeError(f"{getattr(kind, '__name__', kind)} is {type(value).__name__}")
