"""The coordinate system of a sample: the one its policy writes in, and all its places in another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmpack.errors import ArgumentError, TraceError, check_name, kind_of
from mmpack.families import FAMILIES, get_family
from mmpack.grounding.coordinates import as_floats, convert, sizes_of
from mmpack.schema.actions import read_action
from mmpack.schema.rules.actions import Screens
from mmpack.schema.sample import COORDINATE_SYSTEMS, Sample
from mmpack.schema.spans import ActionSpan

QUAD = "quad"  # in `RegionSpan.metadata`: four corners as written


def system_of(family: str) -> str | None:
    """What released models of `family` write boxes and points in; None where that is not known.

    Raises: LayoutError (MM006) for an unknown family.
    """
    return get_family(family).coordinates


def system_written(what: str, sample: Sample, system: str | None = None) -> str | None:
    """The system that the policy of a sample writes in: `system` where the caller says one, else what models of its
    family write, else the sample's own. What it wrote is converted to the sample's own, where that is another one.

    Raises: ArgumentError for a system that a sample can't have, in the name of the function `what`.
    """
    if system is not None:
        check_name(what, "system", system, COORDINATE_SYSTEMS)
    return system or system_of(sample.family) or sample.coordinate_system


def to_system(sample: Sample, target: str) -> Sample:
    """A copy of the sample whose regions, targets and action points are in `target`, of `coordinate_system`s.

    Each number is converted exactly and rounded to a float once. Of what names no medium, sizes are those of the only
    one, or of the screen; an action points at the last image before it. Actions without a `kind`, or which can't be
    read, stay as they are.
    Raises: ArgumentError where the sample has no `coordinate_system` but boxes or points, or a size is not known.
    """
    check_name("to_system", "target", target, COORDINATE_SYSTEMS)
    if not isinstance(sample, Sample):
        raise ArgumentError(f"to_system: sample is {kind_of(sample)}. Fix: pass a Sample")
    changed: dict[str, Any] = {}
    for name in ("region_spans", "bbox_targets", "point_targets"):
        items = getattr(sample, name)
        if items:
            changed[name] = [_moved(sample, item, target) for item in items]
    if sample.action_spans:
        screens = Screens(sample, FAMILIES[sample.family])
        changed["action_spans"] = [
            _moved_action(sample, span, screens.before(span.start), target)
            for span in sample.action_spans
        ]
    return replace(sample, coordinate_system=target, **changed)


def moved(
    sample: Sample,
    places: Mapping[str, tuple[float, ...] | None],
    media_index: int | None,
    source: str | None,
    target: str | None,
) -> dict[str, tuple[float, ...]]:
    """Those of `places` (x, y, x, y, …, by name) that are there, on a medium of the sample, in system `target`.

    Raises: ArgumentError where a size is needed and not known.
    """
    known: dict[str, tuple[float, ...]] = {n: v for n, v in places.items() if v is not None}
    if source is None or target is None or source == target or not known:
        return known
    sizes = sizes_of(sample, media_index)
    if sizes.side(source) is None or sizes.side(target) is None:
        where = "no medium" if media_index is None else f"media[{media_index}]"
        raise ArgumentError(
            f"grounding: {next(iter(known))} in {where} of {sample.sample_id!r:.60} can't be converted from "
            f"{source} to {target}: the picture's size is not known. "
            f"Fix: pass coordinate_system={source!r}, or name a medium of known size"
        )
    return {name: as_floats(convert(v, source, target, sizes)) for name, v in known.items()}


# ---- parts ---------------------------------------------------------------------------------------


def _moved(sample: Sample, item: Any, target: str) -> Any:
    """A region, whose metadata may hold four corners, or a target."""
    corners = item.metadata.get(QUAD) if "form" in item.metadata else None
    places = {"bbox": getattr(item, "bbox", None), "point": getattr(item, "point", None)}
    places[QUAD] = None if corners is None else tuple(corners)
    to: dict[str, Any] = moved(sample, places, item.media_index, _source(sample, places), target)
    if QUAD in to:
        to["metadata"] = {**item.metadata, QUAD: list(to.pop(QUAD))}
    return replace(item, **to)


def _moved_action(
    sample: Sample, span: ActionSpan, media_index: int | None, target: str
) -> ActionSpan:
    try:
        points = read_action(span.action).points()
    except TraceError:
        return span
    if not points:
        return span
    to = moved(sample, points, media_index, _source(sample, points), target)
    return replace(span, action=span.action | {name: list(point) for name, point in to.items()})


def _source(sample: Sample, places: Mapping[str, Any]) -> str | None:
    if sample.coordinate_system is None and any(v is not None for v in places.values()):
        raise ArgumentError(
            "to_system: the sample has boxes or points but no coordinate_system. Fix: set the one they are in"
        )
    return sample.coordinate_system
