"""JSON texts that Python parses, and whether values surely fit a spec."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from mmpack.schema.bounds import MAX_ITEMS
from mmpack.schema.fields import INT_MAX, Array, Float, Floats, Int, Ints, Json, Spec, Str
from mmpack.schema.plain_json import json_fault
from mmpack.schema.spans import ScopeSpec

DOUBTED: Any = object()  # in place of JSON that needs another look
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates: Arrow can't hold it


def fits(spec: Spec, values: Sequence[Any]) -> bool:
    """Whether `spec.read` surely takes each of `values`, parsed JSON without nulls, as it is."""
    kinds = set(map(type, values))
    match spec:
        case Str():
            if not kinds <= {str} or (spec.choices and not set(values) <= set(spec.choices)):
                return False
            if spec.pattern and not all(re.search(spec.pattern, v) for v in set(values)):
                return False
            return not _HALF_PAIR.search("".join(values))
        case Int():
            if not values or not kinds <= {int}:
                return not values
            return spec.low <= min(values) and max(values) <= spec.high
        case Float():
            return kinds <= {int, float} and all(abs(v) <= INT_MAX for v in values)
        case Ints() | Floats():
            item = Int(spec.low, spec.high) if isinstance(spec, Ints) else Float()
            if not kinds <= {list} or (
                spec.length is not None and not set(map(len, values)) <= {spec.length}
            ):
                return False
            return fits(item, list(chain.from_iterable(values)))
        case Array(dtype="int64", rows=None, low=int(), high=int()):
            return kinds <= {list} and fits(
                Int(spec.low or 0, spec.high or 0), list(chain.from_iterable(values))
            )
        case Json():
            return kinds <= {dict} and all(json_fault(v) is None for v in values)
        case ScopeSpec():
            named = [v for v in values if v != "sequence"]  # of a turn or a region, not of a span
            return all(
                type(v) is dict
                and len(v) == 1
                and v.keys() <= {"turn", "region"}
                and fits(Int(), list(v.values()))
                for v in named
            )
    return False


def each_fits(spec: Spec, values: Sequence[Any]) -> np.ndarray:
    """bool [n]: whether a value fits or is None."""
    if fits(spec, [v for v in values if v is not None] if None in values else values):
        return np.ones(len(values), bool)
    return np.array([v is None or fits(spec, [v]) for v in values], bool)


def parsed(text: Any) -> Any:
    """The JSON of a text; DOUBTED for what is none, may have a key twice in one object, or may have too many items."""
    if not isinstance(text, str) or sum(map(text.count, "[{:")) > MAX_ITEMS:
        return DOUBTED
    text = text.strip(" \t\n\r")  # of JSON; its decoder wants none around
    try:
        value, stop = _DECODER.raw_decode(text)
        if text.count(":") != _keys(value):  # else a colon for each key: none came twice
            value, stop = _PAIRS_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return DOUBTED
    return value if stop == len(text) else DOUBTED


def _keys(value: Any) -> int:
    """Keys of an object, or of the objects in a list; not those further in."""
    if type(value) is dict:
        return len(value)
    return sum(map(len, value)) if type(value) is list and set(map(type, value)) == {dict} else 0


def _object(pairs: list[tuple[str, Any]]) -> Any:
    out = dict(pairs)
    return out if len(out) == len(pairs) else DOUBTED


_DECODER, _PAIRS_DECODER = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_object)


def objects(texts: list[Any]) -> list[Any]:
    """The free object of each text, one and the same for equal texts; DOUBTED for what is none."""
    seen: dict[Any, Any] = {None: None}
    for text in texts:
        if not isinstance(text, str | None):
            return [DOUBTED] * len(texts)
        if text not in seen:
            value = parsed(text)
            seen[text] = value if fits(Json(), [value]) else DOUBTED
    return [seen[text] for text in texts]
