"""Boxes and points against their coordinate system (MM310, MM311).

Absolute pixels are those of the image as the model saw it: its grid times the patch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmpack.families import Family

if TYPE_CHECKING:
    from mmpack.schema.sample import Sample

Found = Iterator[tuple[str, str, str, "tuple[int, int] | None"]]
NORMALIZED = {"normalized_1": 1.0, "normalized_1000": 1000.0}
ROUNDING = 1e-6  # of the limit: a number may come through float32
FIELDS = ("region_spans", "bbox_targets", "point_targets")


def places_of(sample: Sample, family: Family) -> Found:
    """The breaks of MM310 and MM311. Numbers of no system (MM308) have no limits."""
    for name in FIELDS:
        for i, item in enumerate(getattr(sample, name) or ()):
            for kind in ("bbox", "point"):
                values = getattr(item, kind, None)
                if values is None:
                    continue
                said = f"has the {'box' if kind == 'bbox' else kind} {_numbers(values)}"
                if kind == "bbox" and (values[0] > values[2] or values[1] > values[3]):
                    yield "MM310", f"{name}[{i}]", said, None
                limits = limits_of(sample, family, item.media_index)
                if sample.coordinate_system and any(
                    is_outside(v, limits[k % 2]) for k, v in enumerate(values)
                ):
                    within = " × ".join(f"[0, {limit:g}]" for limit in limits)
                    message = f"{said}, outside {within} of {sample.coordinate_system}"
                    yield "MM311", f"{name}[{i}]", message, None


def is_outside(value: float, limit: float) -> bool:
    slack = ROUNDING * (limit if limit < float("inf") else 1.0)
    return not -slack <= value <= limit + slack


def limits_of(sample: Sample, family: Family, media_index: int | None) -> tuple[float, float]:
    """The largest x and y: of pixels, those of the medium or of the screen, whichever reach further; else infinite."""
    system = sample.coordinate_system
    if system in NORMALIZED:
        return NORMALIZED[system], NORMALIZED[system]
    known = [] if sample.screen_size is None else [sample.screen_size]
    if media_index is not None and media_index < len(sample.media):
        t, h, w = sample.media[media_index].grid_thw
        if family.pixel_layout == "tiles" and t > 1:  # how they lay is not recorded
            return float("inf"), float("inf")
        known.append((w * family.patch_size, h * family.patch_size))
    if not known:
        return float("inf"), float("inf")
    return float(max(x for x, _ in known)), float(max(y for _, y in known))


def _numbers(values: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{v:g}' for v in values)}]"
