"""`Parts` of a processor, and each resolved setting that decides the layout, as one plain dict (`Sample.processor`).

Settings that change no token, grid or pixel (padding side, return types, length limits) stay out of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mmpack.families import Family
from mmpack.layout.fingerprint import fingerprint
from mmpack.processors.audio import audio_settings
from mmpack.processors.pixels import image_options, view_side
from mmpack.schema.plain_json import canonical_json

# a setting counts only while its switch is on
_SWITCHED = {
    "do_resize": (
        *("resample", "min_pixels", "max_pixels", "height", "width"),
        *("max_height", "max_width", "max_patches", "scale_resolution", "downsample_mode"),
    ),
    "do_rescale": ("rescale_factor",),
    "do_normalize": ("image_mean", "image_std"),
    "do_sample_frames": ("fps", "num_frames", "min_frames", "max_frames"),
    "crop_to_patches": ("min_patches", "max_patches"),
    "do_pan_and_scan": (
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ),
    "slice_mode": ("max_slice_nums",),
    "do_image_splitting": (),
    "use_image_id": (),
}
_TILES = (
    "crop_to_patches",
    "do_pan_and_scan",
    "do_image_splitting",
)  # off, too, they decide a grid
# switches that few processors have
_NOT_EVERYWHERE = ("do_sample_frames", "slice_mode", "use_image_id", *_TILES)
_ALWAYS = ("patch_size", "temporal_patch_size", "merge_size", "max_image_size")


Hashed = tuple[int, dict[str, str | None]]  # tokens added to the vocabulary when it was hashed
_HASHED: WeakKeyDictionary[Any, Hashed] = WeakKeyDictionary()  # of this process


@dataclass
class Parts:
    """What `wrap_processor` has checked: transformers' objects, and how samples are made with them."""

    tokenizer: Any
    image_processor: Any
    video_processor: Any
    feature_extractor: Any
    family: Family
    chat_template: str | None
    position_rule: str
    tokens_per_second: float | None
    video_markers: str  # see `mmpack.versions`
    media_root: Path | None
    kept_as: str  # what pixels are held as
    numbered: bool  # each picture's number is written before its views
    sampling: dict[str, Any] | None  # of `resolved_sampling`
    hashed: Hashed = (-1, {})  # travels to workers

    @property
    def settings(self) -> dict[str, Any]:
        """`Sample.processor`: every setting that decides the layout, as the parts have it now."""
        return describe(self)

    @property
    def vocab_size(self) -> int:
        """Ids are below it: the rows of released embeddings, which are padded, or the tokenizer's tokens, if more."""
        return max(self.family.vocab_size, len(self.tokenizer))

    @property
    def fingerprint(self) -> str:
        """`sha256:<64 hex>` of `settings`."""
        return fingerprint(self.settings)

    @property
    def tokenizer_hashes(self) -> dict[str, str | None]:
        """`vocab_sha256`, over every token and its id; `merges_sha256`, over the merges in order (None: has none).

        Once, since it takes seconds, and again when tokens were added.
        """
        added = len(self.tokenizer.added_tokens_decoder)
        if self.hashed[0] != added:
            self.hashed = _HASHED.get(self.tokenizer, self.hashed)
        if self.hashed[0] != added:
            names = {"vocab_sha256": vocabulary_hash, "merges_sha256": merges_hash}
            self.hashed = (added, {name: hashed(self.tokenizer) for name, hashed in names.items()})
            _HASHED[self.tokenizer] = self.hashed
        return self.hashed[1]


def describe(parts: Parts) -> dict[str, Any]:
    """The `processor` object of a sample."""
    family, tokenizer, template = parts.family, parts.tokenizer, parts.chat_template
    options = image_options(family, parts.image_processor) | _merges(family)
    out: dict[str, Any] = {
        "family": family.name,
        "tokenizer": parts.tokenizer_hashes
        | {"special_ids": special_ids(tokenizer), "vocab_size": parts.vocab_size},
        "chat_template": None if template is None else text_hash(template),
        "image": vision_settings(parts.image_processor, options),
        "video": vision_settings(parts.video_processor),
        "position_rule": parts.position_rule,
        "tokens_per_second": parts.tokens_per_second,
    }
    if parts.sampling is not None and out["video"] is not None:
        out["video"]["sampling"] = parts.sampling
    if family.views is not None and family.views.number is not None and out["image"] is not None:
        out["image"]["use_image_id"] = parts.numbered
    if family.audio is not None:
        out["audio"] = audio_settings(parts.feature_extractor, family.audio)
    if family.video_layout == "frames":
        out["video_markers"] = parts.video_markers
    return out


def vision_settings(processor: Any, options: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The image or video part: sizes in pixels, patches and merges, normalisation, and which library resizes.

    `options`: what is handed to the processor at each call, and counts instead of its own.
    """
    if processor is None:
        return None
    raw = processor.to_dict() | (options or {})
    size = raw.get("size") or {}
    raw["min_pixels"] = size.get("shortest_edge", raw.get("min_pixels"))
    raw["max_pixels"] = size.get("longest_edge", raw.get("max_pixels"))
    raw |= {side: size.get(side) for side in ("height", "width", "max_height", "max_width")}
    raw["max_image_size"] = view_side(processor)
    if "max_soft_tokens" in raw:  # a budget of tokens, each of pooled patches
        raw["merge_size"] = raw["pooling_kernel_size"]
        token = raw["patch_size"] * raw["merge_size"]
        raw["max_pixels"] = raw["max_soft_tokens"] * token**2
    out: dict[str, Any] = {
        "backend": "pil" if type(processor).__name__.endswith("Pil") else "torchvision"
    }
    # a name of two switches: of tiles, where the processor has these
    if "crop_to_patches" in raw and not raw["crop_to_patches"]:
        raw["max_patches"] = None
    for switch, names in _SWITCHED.items():
        on = bool(raw.get(switch, False))
        tiles = switch in _TILES and switch in raw
        if on or tiles or switch not in _NOT_EVERYWHERE:
            out[switch] = on
        if on:
            out |= {name: _plain(name, raw[name]) for name in names if raw.get(name) is not None}
    if raw.get("image_grid_pinpoints"):
        out["image_grid_pinpoints"] = [list(size) for size in raw["image_grid_pinpoints"]]
    out["do_convert_rgb"] = bool(raw.get("do_convert_rgb", False))
    return out | {name: int(raw[name]) for name in _ALWAYS if raw.get(name) is not None}


def _merges(family: Family) -> dict[str, Any]:
    """Sizes that the family has and its image processor does not: it gets their product."""
    if family.pixel_layout != "canvas":
        return {}
    return {"patch_size": family.patch_size, "merge_size": family.spatial_merge_size}


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Added tokens and their ids."""
    return {str(token): int(i) for i, token in sorted(tokenizer.added_tokens_decoder.items())}


def vocabulary_hash(tokenizer: Any) -> str:
    """sha256 hex over every token and its id."""
    return hashlib.sha256(canonical_json(tokenizer.get_vocab()).encode()).hexdigest()


def merges_hash(tokenizer: Any) -> str | None:
    """sha256 hex over the merges of a byte-pair tokenizer, in order; None for one that has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges = None if backend is None else json.loads(backend.to_str())["model"].get("merges")
    if not merges:
        return None
    # pairs, or in older files one text with a space between
    lines = (pair if isinstance(pair, str) else " ".join(pair) for pair in merges)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def text_hash(text: str) -> str:
    """`sha256:<64 hex>` of a text; lone surrogates included."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(name: str, value: Any) -> Any:
    """Only JSON, one spelling per value: no enums, no numpy, lists for tuples, floats where a float is meant."""
    if isinstance(value, Enum):
        value = value.value
    if name in ("image_mean", "image_std"):
        return np.broadcast_to(np.asarray(value, dtype=np.float64), 3).tolist()
    if name in ("rescale_factor", "fps", "pan_and_scan_min_ratio_to_activate"):
        return float(value)
    return value if isinstance(value, str) else int(value)
