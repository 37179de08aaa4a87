"""Regions that the policy wrote against the targets of a sample: a score of each region, and one of the whole set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, check_name, kind_of
from mmpack.families import get_family
from mmpack.grounding.coordinates import as_floats, convert, sizes_of
from mmpack.grounding.overlap import giou, iou, match, point_in_box
from mmpack.schema.rules.places import limits_of, place_faults
from mmpack.schema.sample import Sample
from mmpack.schema.spans import RegionSpan, Score, covered

Values = tuple[float, ...]


@dataclass(frozen=True)
class _Kind:
    worst: float  # of a region that is matched with nothing, or can't be used
    of: Callable[
        [Sequence[Values], Sequence[Values], float], np.ndarray
    ]  # predictions, targets, diagonal
    predicted: tuple[str, ...]  # what of a region is read, the first that it has
    targets: tuple[str, ...]  # fields of the sample that are read
    lengths: bool = False  # speaks of lengths: numbers are converted to pixels


def _centred(places: Sequence[Values]) -> list[Values]:
    """Points, and the centres of boxes."""
    return [p if len(p) == 2 else (p[0] / 2 + p[2] / 2, p[1] / 2 + p[3] / 2) for p in places]


def _nearness(places: Sequence[Values], others: Sequence[Values], diagonal: float) -> np.ndarray:
    """1 - the distance of the centres over the diagonal of the picture: float64 [n, m]."""
    a, b = (np.array(_centred(x)) / diagonal for x in (places, others))
    apart = a[:, None] - b[None]
    distance: np.ndarray = np.hypot(apart[..., 0], apart[..., 1])
    return 1 - distance


_KINDS = {
    "iou": _Kind(0.0, lambda p, t, _: iou(p, t), ("bbox",), ("bbox_targets",)),
    "giou": _Kind(-1.0, lambda p, t, _: giou(p, t), ("bbox",), ("bbox_targets",)),
    "point_in_box": _Kind(
        0.0, lambda p, t, _: point_in_box(_centred(p), t), ("point", "bbox"), ("bbox_targets",)
    ),
    "centre_distance": _Kind(
        0.0, _nearness, ("point", "bbox"), ("bbox_targets", "point_targets"), lengths=True
    ),
}
KINDS = tuple(_KINDS)


def scores(
    sample: Sample, kind: str = "iou", *, name: str | None = None, labels: bool = True
) -> list[Score]:
    """A Score of each region that the policy wrote, with scope `{"region": k}`, against the sample's targets.

    Args: `sample`: with `region_spans`, as `annotate` leaves them, and targets in its `coordinate_system`. `kind`:
    `iou` [0, 1] and `giou` [-1, 1] of boxes; `point_in_box` 0 or 1, of a point, or of the centre of a box;
    `centre_distance` (-∞, 1], 1 - the distance of the centres over the diagonal of the picture, from boxes and points
    to boxes and points. `name`: of the scores, by default the kind. `labels`: a region and a target that both have a
    label are matched only if these are equal, but for case and blanks.
    Regions and targets are matched one to one, by the largest sum of values (`match`); each region gets the value of
    its pair. A region with no partner, with a `problem`, or with a point where a box is asked for, gets the kind's
    worst value: 0, for `giou` -1. Regions without a loss token, and those without box, point or problem, get no score.
    A target with a `media_index` is matched only in that medium.
    Raises: ArgumentError for broken targets, for fields of other types than a trace's, or for sizes that
    `centre_distance` needs and that are not known; MissingExtraError without scipy, for several regions and several
    targets.
    """
    pairs, regions, _ = _paired(sample, kind, labels, "scores")
    return [
        Score(kind if name is None else name, pairs.get(k, _KINDS[kind].worst), {"region": k})
        for k in regions
    ]


def set_score(
    sample: Sample, kind: str = "iou", *, name: str | None = None, labels: bool = True
) -> Score:
    """One Score of the whole sample: the values of matched pairs, and the worst for each region or target without one,
    as a mean over the larger of the two counts.

    So a target that was missed costs as much as a region too many; a mean of `scores` counts only the latter. The
    value is 1 if there is nothing to find and nothing was written. Arguments and errors are those of `scores`.
    """
    pairs, regions, targets = _paired(sample, kind, labels, "set_score")
    count = max(len(regions), targets)
    worst = _KINDS[kind].worst
    total = sum(pairs.values()) + worst * (count - len(pairs))
    return Score(f"{kind}_set" if name is None else name, total / count if count else 1.0)


# ---- parts ---------------------------------------------------------------------------------------


def _paired(
    sample: Any, kind: Any, labels: bool, what: str
) -> tuple[dict[int, float], list[int], int]:
    """The value of each region that has a partner; the regions that are scored; how many targets there are."""
    if not isinstance(sample, Sample):
        raise ArgumentError(f"{what}: sample is {kind_of(sample)}. Fix: pass a Sample")
    check_name(what, "kind", kind, KINDS)
    rule, sample = _KINDS[kind], _checked(sample, what)
    targets = _targets(sample, rule, what)
    regions, usable = _regions(sample, rule)
    if not usable or not targets:
        return {}, regions, len(targets)
    predicted = [_values_of(sample.region_spans[k], rule) for k in usable]  # type: ignore[index]
    wanted = [values for values, _ in targets]
    allowed = np.array(
        [[_may_pair(sample.region_spans[k], t, labels) for _, t in targets] for k in usable]  # type: ignore[index]
    )
    values = _values(sample, rule, usable, predicted, wanted, targets, allowed, what)
    pairs = match(values, allowed)
    return {usable[row]: float(values[row, column]) for row, column in pairs}, regions, len(targets)


def _checked(sample: Sample, what: str) -> Sample:
    """The sample with regions and targets as a trace holds them: numpy's boxes are tuples.

    Raises: ArgumentError for what no trace holds. Numbers that are not finite stay: a policy may have written them.
    """
    changed: dict[str, Any] = {}
    for field in ("region_spans", "bbox_targets", "point_targets"):
        given = getattr(sample, field)
        if given is None:
            continue
        faults: list[TraceError] = []
        changed[field] = Sample.columns()[field].spec.checked(given, field, faults)
        for fault in faults:
            place, _, name = fault.where.partition(".")
            if fault.code != "MM009":
                raise ArgumentError(
                    f"{what}: {place} of sample {sample.sample_id!r:.40} breaks a rule: {name} {fault.why}. "
                    "Fix: mend it; mp.validate lists all"
                )
    return replace(sample, **changed)


def _values(
    sample: Sample,
    rule: _Kind,
    usable: list[int],
    predicted: list[Values],
    wanted: list[Values],
    targets: list[tuple[Values, Any]],
    allowed: np.ndarray,
    what: str,
) -> np.ndarray:
    """float64 [regions, targets]. Lengths are taken in each region's own medium."""
    if not rule.lengths:
        return rule.of(predicted, wanted, 1.0)
    out = np.zeros(allowed.shape)
    for row, k in enumerate(usable):
        sizes = sizes_of(sample, sample.region_spans[k].media_index)  # type: ignore[index]
        system = sample.coordinate_system
        if sizes.model is None or system is None:
            missing = "coordinate_system" if system is None else "size as the model saw it"
            raise ArgumentError(
                f"{what}: centre_distance needs the picture's {missing}, which is not known. "
                "Fix: set it (pictures in several tiles have none), or score by IoU"
            )
        width, height = sizes.model

        def pixels(values: Values, sizes: Any = sizes, system: str = system) -> Values:
            return as_floats(convert(values, system, "absolute_pixels", sizes))

        for column in np.flatnonzero(allowed[row]).tolist():
            pair = [pixels(predicted[row])], [pixels(wanted[column])]
            out[row, column] = rule.of(*pair, float(np.hypot(width, height)))[0, 0]
    return out


def _targets(sample: Sample, rule: _Kind, what: str) -> list[tuple[Values, Any]]:
    """Numbers and record of each target. Raises: ArgumentError for one that breaks a rule."""
    out = []
    for field in rule.targets:
        for i, target in enumerate(getattr(sample, field) or ()):
            values = target.bbox if field == "bbox_targets" else target.point
            if why := _broken(values, 4 if field == "bbox_targets" else 2):
                raise ArgumentError(
                    f"{what}: {field}[{i}] of sample {sample.sample_id!r:.40} {why}. "
                    "Fix: mend it; mp.validate lists all"
                )
            out.append((tuple(values), target))
    return out


def _regions(sample: Sample, rule: _Kind) -> tuple[list[int], list[int]]:
    """The regions that are scored, and those of them that can be compared."""
    written = np.concatenate([[0], np.cumsum(covered(sample.loss_spans, len(sample)))])
    scored, usable = [], []
    for k, region in enumerate(sample.region_spans or ()):
        start, stop = (min(max(at, 0), len(sample)) for at in (region.start, region.stop))
        if written[start] >= written[max(start, stop)]:
            continue
        values = _values_of(region, rule)
        if "problem" in region.metadata or region.bbox is not None or region.point is not None:
            scored.append(k)
        if (
            values is not None
            and not _broken(values, len(values))
            and _in_bounds(sample, region, values)
        ):
            usable.append(k)
    return scored, usable


def _values_of(region: RegionSpan, rule: _Kind) -> Any:
    return next((v for name in rule.predicted if (v := getattr(region, name)) is not None), None)


def _in_bounds(sample: Sample, region: RegionSpan, values: Values) -> bool:
    system = sample.coordinate_system
    limits = limits_of(sample, get_family(sample.family), system, region.media_index)
    return not any(place_faults(values, system, limits))


def _broken(values: Any, size: int) -> str | None:
    """Why the values are no box or point; None if they are one."""
    fits = isinstance(values, (tuple, list)) and len(values) == size in (2, 4)
    try:
        finite = fits and bool(np.isfinite(np.asarray(values, np.float64)).all())
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        return f"is not a {'box' if size == 4 else 'point'} of finite numbers"
    if size == 4 and (values[0] > values[2] or values[1] > values[3]):
        return "has its corners swapped"
    return None


def _may_pair(region: RegionSpan, target: Any, labels: bool) -> bool:
    if target.media_index is not None and target.media_index != region.media_index:
        return False
    if not labels or region.label is None or target.label is None:
        return True
    one, two = (" ".join(label.split()).casefold() for label in (region.label, target.label))
    return one == two
