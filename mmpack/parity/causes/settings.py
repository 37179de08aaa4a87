"""Processor settings that differ, by dotted path; which of them decide a grid."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair, show
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.values import same_value
from mmpack.schema.media import Medium

# of the audio part: how an audio is padded and cut before its features are made
AUDIO_PADDING = ("padding", "padding_side", "padding_value", "truncation", "n_samples")
PIXEL_LIMITS = (
    *("min_pixels", "max_pixels", "total_pixels", "size"),
    *(
        "height",
        "width",
        "max_height",
        "max_width",
        "crop_to_patches",
        "min_patches",
        "max_patches",
    ),  # of tiles
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
# of pictures that are cut into views, each a medium
VIEWS = (
    *("scale_resolution", "max_slice_nums", "slice_mode", "use_image_id"),
    *("max_image_size", "do_image_splitting"),
)
SAMPLING = "video.sampling."
# more settings of a sampling policy: sizes, budgets, and those of neither frames nor sizes
SIZES = ("frame_min_pixels", "frame_max_pixels", "resized_width", "resized_height")
BUDGETS = ("cap_pixels_per_frame", "max_video_tokens")
PATCHES = ("patch_size", "image_patch_size", "temporal_patch_size", "merge_size")
OTHERS = ("model", "transformers", "do_resize", *PATCHES)
SHOWN = 8  # settings named in one finding


def decisive(pair: Pair, modality: str) -> str | None:
    """The family, patch and merge sizes that differ, as text: grids, runs and positions follow from them."""
    found = []
    families = [side.sample.family for side in pair.sides]
    if families[0] != families[1]:
        found.append(f"family: rollout {families[0]}, train {families[1]}")
    left, right = pair.left.sample.processor, pair.right.sample.processor
    if left is not None and right is not None:
        unlike, _ = compare_settings(left, right)
        paths = [path for path in unlike if _of_patches(path) and path.startswith(f"{modality}.")]
        found += [_evidence(paths, unlike)] if paths else []
    return "; ".join(found) or None


def _of_patches(path: str) -> bool:
    return path.partition(".")[2] in PATCHES


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
    return hits + [
        Hit(
            cause=cause,
            field="processor",
            evidence=_evidence(paths, unlike),
            left=f"{paths[0]} {show(unlike[paths[0]][0])}",
            right=f"{paths[0]} {show(unlike[paths[0]][1])}",
        )
        for cause, paths in of.items()
    ]


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


def pixel_settings(pair: Pair, modality: str) -> str | None:
    """The pixel limits that differ, as text; empty if they are equal; None if they were not recorded alike."""
    limits = [_pixel_limits(side.setting(modality)) for side in pair.sides]
    if not all(limits):
        return None
    unlike, lacking = compare_settings({modality: limits[0]}, {modality: limits[1]})
    if lacking and not unlike:
        return None
    return _evidence(list(unlike), unlike)


def view_settings(pair: Pair) -> str:
    """The settings of a picture's views that differ, as text; empty where none does."""
    parts = [side.setting("image") for side in pair.sides]
    if not all(isinstance(part, dict) for part in parts):
        return ""
    unlike, _ = compare_settings(*({"image": part} for part in parts))
    return _evidence([path for path in unlike if path.partition(".")[2] in VIEWS], unlike)


def _pixel_limits(part: Any) -> dict[str, Any]:
    """Those of `processor["image"]` or `processor["video"]`, of its sampling policy as well."""
    if not isinstance(part, dict):
        return {}
    out = {k: v for k, v in part.items() if k in PIXEL_LIMITS}
    sampling = part.get("sampling")
    if isinstance(sampling, dict):
        out["sampling"] = {k: v for k, v in sampling.items() if k in (*PIXEL_LIMITS, *SIZES)}
    return out


def _fingerprints(pair: Pair) -> list[Hit]:
    a, b = (side.sample.processor_fingerprint for side in pair.sides)
    if a is None or b is None or a == b:
        return []
    evidence = "processor_fingerprint differs, settings were not recorded on both sides"
    return [Hit(UNKNOWN, "processor", evidence, show(a), show(b))]


def _cause(path: str) -> str:
    part, _, rest = path.partition(".")
    if part == "audio":
        return audio_cause(rest)
    if part in ("image", "video") and rest.split(".")[0] in PIXEL_LIMITS:
        return "max_pixels"
    if part == "image" and rest in VIEWS:
        return "view_settings"
    if path.startswith(SAMPLING):
        return _of_sampling(rest.split(".")[1])
    if part == "family" or _of_patches(path):
        return "model_family"
    known = {"tokens_per_second": "second_per_grid_ts"}
    own = ("position_rule", "video_markers")
    return known.get(part, part if part in own else UNKNOWN)


def audio_cause(name: str) -> str:
    """Return the cause that a setting of the audio part decides."""
    if name == "sampling_rate":
        return "audio_sampling_rate"
    if name in ("hop_length", "n_fft", "feature_size"):
        return "audio_hop"
    return "audio_padding" if name in AUDIO_PADDING else UNKNOWN


def audio_settings(pair: Pair, cause: str) -> str | None:
    """The settings of a cause in the audio part that differ, as text; empty if none does; None if not recorded."""
    parts = [side.setting("audio") for side in pair.sides]
    if not all(isinstance(part, dict) for part in parts):
        return None
    unlike, _ = compare_settings(*({"audio": part} for part in parts))
    return _evidence([p for p in unlike if audio_cause(p.removeprefix("audio.")) == cause], unlike)


def _of_sampling(name: str) -> str:
    if name in (*PIXEL_LIMITS, *SIZES):
        return "max_pixels"
    if name in OTHERS:
        return UNKNOWN
    if name == "reader":
        return "video_reader"
    return "video_budget" if name in BUDGETS else "frame_sampling"


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
