"""Every resolved setting of a processor that decides the layout, as one plain dict (`Sample.processor`).

Settings that change no token, grid or pixel (padding side, return types, length limits) stay out of it.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mmpack.families import Family
from mmpack.schema.fields import canonical_json

_SWITCHED = {  # a setting counts only while its switch is on
    "do_resize": ("resample", "min_pixels", "max_pixels"),
    "do_rescale": ("rescale_factor",),
    "do_normalize": ("image_mean", "image_std"),
    "do_sample_frames": ("fps", "num_frames", "min_frames", "max_frames"),
}
_HASHED: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()  # size, hash
_ALWAYS = ("patch_size", "temporal_patch_size", "merge_size")


def describe(
    family: Family,
    tokenizer: Any,
    image_processor: Any,
    video_processor: Any,
    chat_template: str | None,
    position_rule: str,
    tokens_per_second: float | None,
    vocab_sha256: str,
) -> dict[str, Any]:
    """The `processor` object of a sample."""
    return {
        "family": family.name,
        "tokenizer": {
            "vocab_sha256": vocab_sha256,
            "special_ids": special_ids(tokenizer),
        },
        "chat_template": None if chat_template is None else text_hash(chat_template),
        "image": vision_settings(image_processor),
        "video": vision_settings(video_processor),
        "position_rule": position_rule,
        "tokens_per_second": tokens_per_second,
    }


def vision_settings(processor: Any) -> dict[str, Any] | None:
    """The image or video part: sizes in pixels, patches and merges, normalisation, and which library resizes."""
    if processor is None:
        return None
    raw = processor.to_dict()
    size = raw.get("size") or {}
    raw["min_pixels"] = size.get("shortest_edge", raw.get("min_pixels"))
    raw["max_pixels"] = size.get("longest_edge", raw.get("max_pixels"))
    out: dict[str, Any] = {
        "backend": "pil" if type(processor).__name__.endswith("Pil") else "torchvision"
    }
    for switch, names in _SWITCHED.items():
        on = bool(raw.get(switch, False))
        if on or switch != "do_sample_frames":
            out[switch] = on
        if on:
            out |= {name: _plain(name, raw[name]) for name in names if raw.get(name) is not None}
    out["do_convert_rgb"] = bool(raw.get("do_convert_rgb", False))
    return out | {name: int(raw[name]) for name in _ALWAYS}


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Added tokens and their ids."""
    return {str(token): int(i) for i, token in sorted(tokenizer.added_tokens_decoder.items())}


def vocabulary_hash(tokenizer: Any) -> str:
    """sha256 hex over every token and its id; once a tokenizer, since it takes seconds."""
    size, digest = _HASHED.get(tokenizer, (-1, ""))
    if size != len(tokenizer):
        vocabulary = canonical_json(tokenizer.get_vocab())
        size, digest = len(tokenizer), hashlib.sha256(vocabulary.encode()).hexdigest()
        _HASHED[tokenizer] = size, digest
    return digest


def text_hash(text: str) -> str:
    """`sha256:<64 hex>` of a text; lone surrogates included."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(name: str, value: Any) -> Any:
    """JSON alone, one spelling a value: no enums, no numpy, lists for tuples, floats where a float is meant."""
    if isinstance(value, Enum):
        value = value.value
    if name in ("image_mean", "image_std"):
        return np.broadcast_to(np.asarray(value, dtype=np.float64), 3).tolist()
    if name in ("rescale_factor", "fps"):
        return float(value)
    return value if isinstance(value, str) else int(value)
