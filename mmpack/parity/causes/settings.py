"""Processor settings that differ, by dotted path; which of them decide a grid."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair, show
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.values import same_value
from mmpack.schema.media import Medium

_PIXEL_LIMITS = """
    min_pixels max_pixels total_pixels size height width max_height max_width crop_to_patches min_patches max_patches
    do_pan_and_scan pan_and_scan_min_crop_size pan_and_scan_max_num_crops pan_and_scan_min_ratio_to_activate
"""
_PATCHES = "patch_size image_patch_size temporal_patch_size merge_size"
_TRANSFORM = "resample do_rescale rescale_factor do_normalize image_mean image_std"
_VIEWS = "scale_resolution max_slice_nums slice_mode use_image_id max_image_size do_image_splitting"
# of each part of `processor`, of a video's sampling policy, and of itself: the settings that show a cause
_SETTINGS: dict[str, dict[str, str]] = {
    "image": {
        "model_family": _PATCHES,
        "max_pixels": f"{_PIXEL_LIMITS} do_resize",
        "view_settings": _VIEWS,
        "pixel_transform": _TRANSFORM,
    },
    "video": {
        "model_family": _PATCHES,
        "max_pixels": f"{_PIXEL_LIMITS} do_resize",
        "pixel_transform": _TRANSFORM,
    },
    "sampling": {  # all others choose frames
        "max_pixels": f"{_PIXEL_LIMITS} frame_min_pixels frame_max_pixels resized_width resized_height",
        "video_reader": "reader",
        "video_budget": "cap_pixels_per_frame max_video_tokens",
        UNKNOWN: f"model transformers do_resize {_PATCHES}",
    },
    "audio": {
        "audio_sampling_rate": "sampling_rate",
        "audio_hop": "hop_length n_fft feature_size",
        "audio_padding": "padding padding_side padding_value truncation n_samples",
    },
    "": {
        "model_family": "family",
        "position_rule": "position_rule",
        "second_per_grid_ts": "tokens_per_second",
        "video_markers": "video_markers",
    },
}
# part -> setting -> cause
_CAUSES = {
    part: {name: cause for cause, names in of.items() for name in names.split()}
    for part, of in _SETTINGS.items()
}
SAMPLING = "video.sampling."
SHOWN = 8  # settings named in one finding


def decisive(pair: Pair, modality: str) -> str | None:
    """The family, patch and merge sizes that differ, as text: grids, runs and positions follow from them."""
    families = [side.sample.family for side in pair.sides]
    found = [f"family: rollout {families[0]}, train {families[1]}"] * (families[0] != families[1])
    patches = settings_of(pair, modality, "model_family")
    return "; ".join([*found, *([patches] if patches else [])]) or None


def settings_of(pair: Pair, part: str, cause: str) -> str | None:
    """The settings of a part that show a cause and differ, as text; empty if they are equal.

    None if they were not recorded alike.
    """
    kept = [_that_show(cause, part, side.setting(part)) for side in pair.sides]
    if not all(kept):
        return None
    unlike, lacking = compare_settings({part: kept[0]}, {part: kept[1]})
    return None if lacking and not unlike else _evidence(list(unlike), unlike)


def keyed_by(pair: Pair, part: str) -> tuple[str, str] | None:
    """The first cause that settings of a part show, and these: cache keys follow from them."""
    found = ((cause, settings_of(pair, part, cause)) for cause in _SETTINGS[part])
    return next(((cause, text) for cause, text in found if text), None)


def _that_show(cause: str, part: str, settings: Any) -> dict[str, Any]:
    """Those of `processor["image"]` or another part; of a sampling policy as well."""
    if not isinstance(settings, dict):
        return {}
    out = {k: v for k, v in settings.items() if _CAUSES[part].get(k) == cause}
    if isinstance(sampling := settings.get("sampling"), dict):
        out["sampling"] = {k: v for k, v in sampling.items() if _CAUSES["sampling"].get(k) == cause}
    return out


def setting_hits(pair: Pair) -> list[Hit]:
    """One hit for each cause that the settings show, naming every setting that differs.

    Another family's processor has other settings throughout.
    """
    of: dict[str, list[str]] = {}
    hits = []
    families = [side.sample.family for side in pair.sides]
    if families[0] != families[1]:
        evidence = f"family: rollout {families[0]}, train {families[1]}"
        hits.append(Hit("model_family", "family", evidence, families[0], families[1]))
    left, right = pair.left.sample.processor, pair.right.sample.processor
    if left is None or right is None:
        return hits or _fingerprints(pair)
    unlike, _ = compare_settings(left, right)
    for path in unlike:
        cause = "model_family" if hits else _cause(path)
        if path == f"{SAMPLING}policy" and not hits:
            cause = _of_policy(pair)
        of.setdefault(cause, []).append(path)
    for cause, paths in of.items():
        one, two = (f"{paths[0]} {show(value)}" for value in unlike[paths[0]])
        hits.append(Hit(cause, "processor", _evidence(paths, unlike), one, two))
    return hits


def _of_policy(pair: Pair) -> str:
    """Return the cause that another sampling policy shows: it chooses frames and sizes, and frames may be equal."""
    left, right = ([m for m in s.sample.media if m.modality == "video"] for s in pair.sides)
    videos = list(zip(left, right, strict=False))
    if len(left) != len(right) or not all(_same_frames(a, b) for a, b in videos) or not videos:
        return "frame_sampling"
    resized = any(a.grid_thw != b.grid_thw for a, b in videos)
    return "video_budget" if resized else UNKNOWN


def _same_frames(a: Medium, b: Medium) -> bool:
    one, two = a.frame_indices, b.frame_indices
    return one is not None and two is not None and np.array_equal(one, two)


def compare_settings(
    left: dict[str, Any], right: dict[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, str]]:
    """Settings that differ (path to both values), and why others were not compared (path to reason).

    Reason: the side that did not record it; or rendered, of a chat template, which is compared by its text in the ids.
    A setting that only one of two sampling policies has is not lacking.
    """
    a, b = _flat(left), _flat(right)
    unlike = {
        path: (a[path], b[path]) for path in a if path in b and not same_value(a[path], b[path])
    }
    lacking = {path: "train" for path in a if path not in b}
    lacking |= {path: "rollout" for path in b if path not in a}
    if unlike.pop("chat_template", None):
        lacking["chat_template"] = "rendered"
    if f"{SAMPLING}policy" in unlike:
        lacking = {path: side for path, side in lacking.items() if not path.startswith(SAMPLING)}
    return unlike, lacking


def limits_fix(pair: Pair) -> str:
    """Return a fix by the names that users set; empty for min_pixels and max_pixels, which FIXES names."""
    parts = [side.sample.processor or {} for side in pair.sides]
    unlike, _ = compare_settings(*parts)
    family = pair.left.family
    names = {name: f"size.{name}" for name in ("height", "width")} | dict(family.images.limit_names)
    found = {}
    for path, values in unlike.items():
        if _cause(path) == "max_pixels":
            own = path.partition(".")[2].removeprefix("sampling.")
            name = names.get(own, own)
            if name.endswith("_tokens") and all(type(value) is int for value in values):
                token = (family.patch_size * family.spatial_merge_size) ** 2
                values = (values[0] // token, values[1] // token)
            found[name] = f"{name} (rollout {show(values[0])}, train {show(values[1])})"
    if found.keys() <= {"min_pixels", "max_pixels"}:
        return ""
    return f"Set the same {', '.join(found.values())} on both sides."


def _fingerprints(pair: Pair) -> list[Hit]:
    a, b = (side.sample.processor_fingerprint for side in pair.sides)
    if a is None or b is None or a == b:
        return []
    evidence = "processor_fingerprint differs, settings were not recorded on both sides"
    return [Hit(UNKNOWN, "processor", evidence, show(a), show(b))]


def _cause(path: str) -> str:
    part, _, rest = path.partition(".")
    if path.startswith(SAMPLING):
        part, rest = "sampling", path.removeprefix(SAMPLING)
    if part not in _CAUSES:
        part, rest = "", path
    other = "frame_sampling" if part == "sampling" else UNKNOWN
    return _CAUSES[part].get(rest.partition(".")[0], other)


def _evidence(paths: list[str], unlike: dict[str, tuple[Any, Any]]) -> str:
    parts = [
        f"processor.{path}: rollout {show(unlike[path][0])}, train {show(unlike[path][1])}"
        for path in paths[:SHOWN]
    ]
    more = len(paths) - SHOWN
    return "; ".join(parts) + (f"; and {more} more settings" if more > 0 else "")


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Leaves by dotted path; a setting that is null was not recorded."""
    out: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", settings)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack.extend((f"{path}.{key}" if path else str(key), v) for key, v in value.items())
        elif value is not None:
            out[path] = list(value) if isinstance(value, tuple) else value
    return dict(sorted(out.items()))
