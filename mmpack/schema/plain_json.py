"""Free objects of a record: what of them JSON can carry."""

from __future__ import annotations

import json
import math
from typing import Any

from mmpack.schema.error_text import shown, trace_error

MAX_DEPTH = 32


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON can't carry: other types, NaN, integers beyond 64 bits, deep nesting."""
    fault = json_fault(value)
    if fault is not None:
        raise trace_error(where, *fault)


def json_fault(value: Any) -> tuple[str, str] | None:
    """Why JSON can't carry `value`, and the code; None if it can. Iterative: depth can't overflow the stack."""
    stack = [iter((value,))]
    while stack:
        for item in stack[-1]:
            kind = type(item)
            if kind is dict or kind is list or kind is tuple:
                if kind is dict and not all(type(key) is str for key in item):
                    return "holds an object with a key that is not a string", "MM003"
                if len(stack) > MAX_DEPTH + 1:
                    return f"is nested deeper than {MAX_DEPTH} levels", "MM010"
                stack.append(iter(item.values() if kind is dict else item))
                break
            if kind is float:
                if not math.isfinite(item):
                    return f"holds {item}, which is not a finite number", "MM009"
            elif kind is int:
                if not -(2**63) <= item < 2**64:
                    return f"holds {shown(item)}, which is beyond 64 bits", "MM003"
            elif kind not in (bool, str, type(None)):
                return f"holds a value of type {kind.__name__}, which JSON does not have", "MM003"
        else:
            stack.pop()
    return None


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
