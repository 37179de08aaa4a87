"""Routes of a mixture of experts, as the engine took them: [L, layers, k] expert ids in one or two bytes each.

In a record they are their bytes as base64: k · layers bytes a token (twice that from 257 experts on), and a third more
as text. Parquet compresses that third away.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.specs import COUNT_MAX, Ints, Spec

DTYPES = ("uint8", "uint16")  # up to 256 experts, up to 65,536
_KEYS = ("dtype", "shape", "base64")


def compact_routes(values: Any, num_experts: int) -> np.ndarray:
    """Expert ids [L, layers, k] in the dtype of `num_experts`: uint8 up to 256, uint16 up to 65,536.

    Args: `values`: integers [L, layers, k], as vLLM and SGLang return them. `num_experts`: of each layer.

    Raises: ArgumentError for another shape, and for an id that no expert has.

    Example:
        >>> from mmpack.schema.routes import compact_routes
        >>> routes = compact_routes([[[3, 0]], [[1, 2]]], num_experts=128)
        >>> routes.dtype, routes.shape
        (dtype('uint8'), (2, 1, 2))
    """
    check_whole("compact_routes", "num_experts", num_experts, least=1)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = np.zeros(0, object)
    if array.ndim != 3 or array.dtype.kind not in "iu" or not all(array.shape[1:]):
        known = isinstance(values, np.ndarray)
        what = f"{array.dtype} {list(array.shape)}" if known else kind_of(values)
        raise ArgumentError(
            f"compact_routes: values is {what}, expected integers [tokens, layers, k]. "
            "Fix: pass the engine's routed_experts"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < num_experts:
        raise ArgumentError(
            f"compact_routes: values lie in [{array.min()}, {array.max()}], but there are {num_experts} experts. "
            "Fix: pass the model's number of experts per layer"
        )
    if num_experts > 2**16:
        raise ArgumentError(
            f"compact_routes: num_experts is {num_experts}, but an id of two bytes allows 65,536. Fix: check the number"
        )
    return np.ascontiguousarray(array, dtype="uint8" if num_experts <= 256 else "uint16")


def layers_with_experts(routes: np.ndarray) -> np.ndarray:
    """Routes [L, layers, k] without the layers that are zeros throughout: engines write these for dense layers.

    All layers stay where none has another id than 0, and with one expert per token, where expert 0 may be meant.
    """
    taken = routes.any(axis=(0, 2))
    return routes[:, taken] if routes.shape[2] > 1 and taken.any() else routes


def rows_read(length: int, loss_indices: np.ndarray) -> int:
    """How many rows, from the first on, decide a logprob: those before the last loss token.

    The engine never ran the last token that it sampled, so its row may hold anything.
    """
    return min(int(loss_indices.max()), length) if len(loss_indices) else 0


@dataclass(frozen=True)
class RoutesSpec(Spec):
    """An array uint8 or uint16 [L, layers, k]; in JSON `{"dtype": …, "shape": […], "base64": …}`, little-endian."""

    def read(self, value: Any, where: str) -> np.ndarray:
        if isinstance(value, np.ndarray):
            if why := _fault(value):
                raise trace_error(where, why, "MM008" if value.ndim != 3 else "MM003")
            return np.ascontiguousarray(value)
        if not isinstance(value, dict) or set(value) != set(_KEYS):
            what = (
                f"an object of {', '.join(_KEYS)}, in memory what mp.schema.compact_routes returns"
            )
            raise trace_error(where, f"expected {what}, found {shown(value)}")
        dtype, text = value["dtype"], value["base64"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise trace_error(f"{where}.dtype", f"{shown(dtype)} is none of {', '.join(DTYPES)}")
        shape = Ints(3).read(value["shape"], f"{where}.shape")
        if not isinstance(text, str):
            raise trace_error(f"{where}.base64", f"expected a text, found {shown(text)}")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise trace_error(f"{where}.base64", "is not base64") from None
        wanted = math.prod(shape) * np.dtype(dtype).itemsize
        if len(data) != wanted:
            why = f"holds {len(data)} bytes, shape {list(shape)} of {dtype} has {wanted}"
            raise trace_error(f"{where}.base64", why, "MM008")
        if not all(shape[1:]):
            raise trace_error(
                f"{where}.shape", f"is {list(shape)}, without a layer or route", "MM008"
            )
        stored = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        return stored.astype(dtype).reshape(shape)

    def holds(self, value: Any) -> bool:
        return type(value) is np.ndarray and value.flags.c_contiguous and not _fault(value)

    def write(self, value: Any, numpy: bool) -> Any:
        """As bytes either way: nested lists would take three times as much."""
        if not isinstance(value, np.ndarray) or _fault(value):
            return value  # which `read` refuses
        data = value.astype(value.dtype.newbyteorder("<")).tobytes()
        text = base64.b64encode(data).decode("ascii")
        return {"dtype": value.dtype.name, "shape": list(value.shape), "base64": text}

    def schema(self) -> dict[str, Any]:
        count = {"type": "integer", "minimum": 0, "maximum": COUNT_MAX}
        return {
            "type": "object",
            "properties": {
                "dtype": {"type": "string", "enum": list(DTYPES)},
                "shape": {"type": "array", "items": count, "minItems": 3, "maxItems": 3},
                "base64": {"type": "string", "contentEncoding": "base64"},
            },
            "required": list(_KEYS),
            "additionalProperties": False,
        }


def _fault(array: np.ndarray) -> str:
    """Why an array is no routes; nothing if it is."""
    if array.ndim != 3 or not all(array.shape[1:]):
        return f"has shape {list(array.shape)}, expected [tokens, layers, k]"
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        return f"is of {array.dtype}, expected uint8 (up to 256 experts) or uint16: see mp.schema.compact_routes"
    return ""
