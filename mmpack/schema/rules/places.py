"""Boxes and points against their coordinate system (MM310, MM311, MM314), and the screen (MM315).

Absolute pixels are those of the image as the model saw it: its grid times the patch size. A place that names no medium
may be in any picture or video: it is outside where it is beyond all of them. Fractions are outside of pixels and of
thousandths: nobody means the corner's first one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.families import Family
from mmpack.schema.codes import Found
from mmpack.schema.sample import Sample

NORMALIZED = {"normalized_1": 1.0, "normalized_1000": 1000.0}
ROUNDING = 1e-6  # of the limit: a number may come through float32
FIELDS = ("region_spans", "bbox_targets", "point_targets")


def problems(sample: Sample, family: Family) -> Found:
    """Numbers without a coordinate system (MM308) have no limits."""
    if sample.screen_size is not None and min(sample.screen_size) < 1:
        width, height = sample.screen_size
        yield "MM315", "screen_size", f"is {width} × {height}", None
    for name in FIELDS:
        for i, item in enumerate(getattr(sample, name) or ()):
            for kind in ("bbox", "point"):
                values = getattr(item, kind, None)
                if values is not None:
                    limits = _limits(sample, family, item.media_index)
                    for code, why in place_faults(values, sample.coordinate_system, limits):
                        yield code, f"{name}[{i}]", why, None


def place_faults(
    values: tuple[float, ...], system: str | None, limits: tuple[float, float]
) -> Iterator[tuple[str, str]]:
    """(code, what is wrong) of a box's four numbers, or a point's two. `limits`: the largest x and y; None of `system`:
    there are none."""
    said = f"has the {'box' if len(values) == 4 else 'point'} {_numbers(values)}"
    if len(values) == 4:
        x0, y0, x1, y1 = values
        if x0 > x1 or y0 > y1:
            yield "MM310", said
        elif x0 == x1 or y0 == y1:
            yield "MM314", f"{said}, without area"
    if system and any(_is_outside(v, limits[k % 2]) for k, v in enumerate(values)):
        within = " × ".join(f"[0, {limit:g}]" for limit in limits)
        yield "MM311", f"{said}, outside {within} of {system}"
    elif system and system != "normalized_1" and _are_fractions(np.array(values)):
        yield "MM311", f"{said}, fractions of a side, not {system}"


def _are_fractions(values: np.ndarray) -> np.ndarray:
    """Whether numbers [..., n] lie between 0 and 1 and are not all whole: parts of a side, not its pixels."""
    inside = ((values >= 0) & (values <= 1)).all(axis=-1)
    return np.asarray(inside & (values != np.floor(values)).any(axis=-1))


def _is_outside(value: float, limit: float) -> bool:
    slack = ROUNDING * (limit if limit < float("inf") else 1.0)
    return not -slack <= value <= limit + slack


def _limits(sample: Sample, family: Family, media_index: int | None) -> tuple[float, float]:
    seen = [k for k, medium in enumerate(sample.media) if medium.modality != "audio"]
    named = seen if media_index is None else [media_index]
    system = sample.coordinate_system
    found = [limits_of(sample, family, system, k) for k in named or (None,)]
    return max(x for x, _ in found), max(y for _, y in found)


def limits_of(
    sample: Sample, family: Family, system: str | None, media_index: int | None
) -> tuple[float, float]:
    """The largest x and y: in pixels, the larger of the medium's and the screen's; infinite if neither is known."""
    if system in NORMALIZED:
        return NORMALIZED[system], NORMALIZED[system]
    known = [] if sample.screen_size is None else [sample.screen_size]
    if media_index is not None and media_index < len(sample.media):
        t, h, w = sample.media[media_index].grid_thw
        if family.pixel_layout == "tiles" and t > 1:  # how they lie is not recorded
            return float("inf"), float("inf")
        known.append((w * family.patch_size, h * family.patch_size))
    if not known:
        return float("inf"), float("inf")
    return float(max(x for x, _ in known)), float(max(y for _, y in known))


def _numbers(values: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{v:g}' for v in values)}]"
