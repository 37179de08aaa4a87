"""What a framework holds that a Sample has no field for, as JSON: arrays, tensors, tuples, NaN, bit for bit.

It goes through a sample's metadata as `Held`: the object itself in memory, JSON in a trace file.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmpack.errors import needs

with needs("hf", __name__):
    import torch


class Held:
    """A value in a sample's metadata that a trace holds as JSON.

    Its dicts, lists and tuples are copied, its tensors are detached and on the host, where they are not copied; all
    else is what was handed in.
    """

    def __init__(self, value: Any):
        self.value = _on_host(value)

    def to_json(self) -> Any:
        """As `mp.write_trace` writes it; `held` reads it."""
        return encode(self.value)


def held(metadata: Mapping[str, Any], key: str) -> Any:
    """What is held under a key, in memory or as a trace has it; None where nothing is."""
    value = metadata.get(key)
    return value.value if isinstance(value, Held) else decode(value)


def encode(value: Any) -> Any:
    """`value` as JSON has it; arrays and tensors bit for bit. What no JSON can hold (an open image) stays as it is.

    Such a sample is whole in memory, and `mp.write_trace` names what it can't write.

    Example:
        >>> from mmpack.adapters.json_values import decode, encode
        >>> encode({"a": (1, float("inf"))})
        {'a': {'__tuple__': [1, {'__float__': 'inf'}]}}
        >>> decode(encode({"a": (1, float("inf"))}))
        {'a': (1, inf)}
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""  # it has no stride
        kind = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": kind, "shape": list(value.shape), "data": _text(raw)}
    if isinstance(value, np.generic):
        value = np.asarray(value)
        return {"__scalar__": encode(value)}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            items = [encode(v) for v in value.reshape(-1)]
            return {"__objects__": items, "shape": list(value.shape)}
        kind = value.dtype.str
        data = _text(np.ascontiguousarray(value).tobytes())
        return {"__array__": kind, "shape": list(value.shape), "data": data}
    if isinstance(value, bytes):
        return {"__bytes__": _text(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(value)}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: encode(v) for k, v in value.items()}
        return {"__items__": [[encode(k), encode(v)] for k, v in value.items()]}
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value), None):
        case "__tensor__":
            raw = torch.frombuffer(bytearray(_bytes(value["data"]) or b"\0"), dtype=torch.uint8)
            raw = raw[:0] if 0 in value["shape"] else raw
            return raw.view(getattr(torch, value["__tensor__"])).reshape(value["shape"])
        case "__scalar__":
            return decode(value["__scalar__"])[()]
        case "__array__":
            flat = np.frombuffer(_bytes(value["data"]), dtype=np.dtype(value["__array__"]))
            return flat.reshape(value["shape"]).copy()
        case "__objects__":
            out = np.empty(len(value["__objects__"]), dtype=object)
            for i, item in enumerate(value["__objects__"]):
                out[i] = decode(item)
            return out.reshape(value["shape"])
        case "__bytes__":
            return _bytes(value["__bytes__"])
        case "__float__":
            return float(value["__float__"])
        case "__tuple__":
            return tuple(decode(v) for v in value["__tuple__"])
        case "__items__":
            return {decode(k): decode(v) for k, v in value["__items__"]}
    return {k: decode(v) for k, v in value.items()}


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: _on_host(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_on_host(v) for v in value]
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
