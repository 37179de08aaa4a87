"""What the tokens of a sample say of places: regions, each number with its tokens, and what can't be read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from mmpack.errors import ArgumentError, check_name, kind_of
from mmpack.families import get_family
from mmpack.grounding.samples import QUAD, moved, system_written, to_system
from mmpack.grounding.text import FORMS, Malformed, Place, read_places
from mmpack.layout.token_text import TokenText, token_text
from mmpack.schema.rules import Problem
from mmpack.schema.rules.places import limits_of, place_faults
from mmpack.schema.sample import COORDINATE_SYSTEMS, Sample
from mmpack.schema.spans import RegionSpan

WHERE = ("loss", "all")


@dataclass(frozen=True)
class Found:
    """What `find` returns: a region for each place, in order; of one that can't be used, a problem as well."""

    regions: list[RegionSpan]
    problems: list[Problem]


def find(
    sample: Sample,
    tokenizer: Any,
    *,
    where: str = "loss",
    forms: Sequence[str] = FORMS,
    system: str | None = None,
    media_index: int | None = None,
) -> Found:
    """The places that a sample's tokens speak of.

    Args: `tokenizer`: as for `mmpack.layout.token_text`. `where`: `loss`, only what the policy wrote (loss spans that
    touch are read as one text); `all`, every token. `forms`: of `FORMS`: `markers` (`<|box_start|>`, `<box>`,
    `<point>`, …), `json` (`bbox_2d`, `point_2d`), `plain` ((x, y), [x, y], [x0, y0, x1, y1]). `system`: what the
    policy writes in, by default what models of its family do, else the sample's `coordinate_system`; bounds are not
    checked where neither is known. `media_index`: the medium that is spoken of, by default the last one before.
    Returns: Found. A region covers its whole text, markers or JSON object included; its numbers are in
    the sample's `coordinate_system`, or as written where it has none.
    `metadata` holds `form` and `numbers`, [start, stop) of the tokens of each number (a token that straddles two
    belongs to both), and `quad` where four corners are written. A place that can't be used (not closed, NaN, corners
    swapped, no area, out of bounds, no medium) has neither box nor point, but `problem`, its code: MM313, MM310, MM314,
    MM311 or MM106. Such a sample is still valid, so that a policy is trained on what it got wrong.
    Raises: ArgumentError for the arguments, and where numbers need a size to be converted that is not known. Nothing
    that a policy writes raises by itself.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> pieces = [b"<|box_start|>", b"(12,", b"3),(4", b"5,67)", b"<|box_end|>"]
        >>> image = mp.Medium("a", "image", "k", (1, 8, 8), 16)
        >>> sample = mp.Sample("s", "g", "qwen2_5_vl", np.arange(5), [image], [], [mp.LossSpan(1, 5)])
        >>> found = mp.grounding.find(sample, pieces.__getitem__, where="all")
        >>> found.regions[0].bbox, found.regions[0].metadata["numbers"]
        ((12.0, 3.0, 45.0, 67.0), [[1, 2], [2, 3], [2, 4], [3, 4]])
    """
    system = _checked(sample, where, forms, system, media_index)
    regions: list[RegionSpan] = []
    problems: list[Problem] = []
    medium_before = _MediumBefore(sample, media_index)
    for start, stop in _texts(sample, where):
        text = token_text(sample.input_ids, tokenizer, start, stop)
        for found in read_places(text.text, tuple(forms)):
            region, problem = _region(sample, text, found, system, medium_before)
            regions += [] if region is None else [region]
            problems += [] if problem is None else [problem]
    return Found(regions, problems)


def annotate(
    sample: Sample,
    tokenizer: Any,
    *,
    where: str = "loss",
    forms: Sequence[str] = FORMS,
    system: str | None = None,
    media_index: int | None = None,
) -> Sample:
    """A copy of the sample with what `find` gives in `region_spans`, and `coordinate_system` set.

    A sample that has no `coordinate_system` gets the one that is written. Regions that were there stay first,
    and are not added twice.
    Raises: ArgumentError as `find`, where no system is known, and for boxes or points in none.
    """
    system = _checked(sample, where, forms, system, media_index, "annotate")
    if system is None:
        raise ArgumentError(
            f"annotate: the coordinate system that {sample.family} writes is not known. "
            f"Fix: pass system=, one of {', '.join(COORDINATE_SYSTEMS)}"
        )
    options: dict[str, Any] = {"where": where, "forms": forms, "media_index": media_index}
    found = find(sample, tokenizer, system=system, **options)
    if sample.coordinate_system is None:
        sample = to_system(sample, system)
    known = {(r.start, r.stop) for r in sample.region_spans or ()}
    new = [region for region in found.regions if (region.start, region.stop) not in known]
    return replace(sample, region_spans=[*(sample.region_spans or []), *new])


# ---- parts ---------------------------------------------------------------------------------------


def _checked(
    sample: Any, where: Any, forms: Any, system: Any, media_index: Any, what: str = "find"
) -> str | None:
    """The system that numbers are written in, of options that are right."""
    if not isinstance(sample, Sample):
        raise ArgumentError(f"{what}: sample is {kind_of(sample)}. Fix: pass a Sample")
    check_name(what, "where", where, WHERE)
    if isinstance(forms, str) or not isinstance(forms, Sequence):
        raise ArgumentError(
            f"{what}: forms is {kind_of(forms)}. Fix: pass a list of {', '.join(FORMS)}"
        )
    for form in forms:
        check_name(what, "forms", form, FORMS)
    if media_index is not None and not (
        isinstance(media_index, Integral) and 0 <= int(media_index) < len(sample.media)
    ):
        raise ArgumentError(
            f"{what}: media_index is {media_index!r:.40}, but there are {len(sample.media)} media. "
            "Fix: pass an index into sample.media"
        )
    return system_written(what, sample, system)


def _texts(sample: Sample, where: str) -> Iterator[tuple[int, int]]:
    """[start, stop) of the tokens that are read as one text each."""
    if where == "all":
        yield 0, len(sample)
        return
    start = stop = 0
    for span in sorted(sample.loss_spans, key=lambda s: s.start):
        if span.start > stop:
            if start < stop:
                yield start, stop
            start = span.start
        stop = min(max(stop, span.stop), len(sample))
    if start < stop:
        yield start, stop


def _region(
    sample: Sample,
    text: TokenText,
    found: Place | Malformed,
    system: str | None,
    medium_before: _MediumBefore,
) -> tuple[RegionSpan | None, Problem | None]:
    span = text.span(found.start, found.stop)
    index = medium_before(span[0])
    fault = _fault(sample, found, system, index)
    problem = (
        None if fault is None else Problem(fault[0], sample.sample_id, "input_ids", fault[1], span)
    )
    if index is None:  # a region names a medium
        return None, problem
    region = RegionSpan(*span, index)
    if isinstance(found, Place):
        region.label = found.label
        region.metadata["form"] = found.form
        region.metadata["numbers"] = [list(text.span(*number)) for number in found.numbers]
        if fault is None:
            written = {"bbox": found.bbox, "point": found.point, QUAD: found.quad}
            places = moved(sample, written, index, system, sample.coordinate_system)
            region.bbox, region.point = places.get("bbox"), places.get("point")
            if QUAD in places:
                region.metadata[QUAD] = list(places[QUAD])
    if fault is not None:
        region.metadata["problem"] = fault[0]
    return region, problem


def _fault(
    sample: Sample, found: Place | Malformed, system: str | None, index: int | None
) -> tuple[str, str] | None:
    """Code and message of why a place can't be used."""
    if isinstance(found, Malformed):
        return "MM313", found.why
    if index is None:
        return "MM106", "speaks of a place, the sample has no media"
    limits = limits_of(sample, get_family(sample.family), system, index)
    for values in (found.bbox, found.point):
        if values is not None:
            for fault in place_faults(values, system, limits):
                return fault
    return None


class _MediumBefore:
    """The medium whose placeholders begin last before a token; before all of them, the first; None without any."""

    def __init__(self, sample: Sample, given: int | None) -> None:
        shown = [s for s in sample.modality_spans if s.media_index < len(sample.media)]
        shown.sort(key=lambda s: s.start)
        self.starts = [s.start for s in shown]
        self.media = [s.media_index for s in shown]
        self.first = 0 if sample.media else None
        self.given = None if given is None else int(given)

    def __call__(self, token: int) -> int | None:
        if self.given is not None:
            return self.given
        at = bisect_right(self.starts, token)
        return self.media[at - 1] if at else self.first
