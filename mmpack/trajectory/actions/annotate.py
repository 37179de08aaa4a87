"""Samples with their actions written down, and the check of those that are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, check_name, check_number
from mmpack.grounding.samples import system_written, to_system
from mmpack.layout.token_text import token_text
from mmpack.schema.actions import Action, read_action
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.spans import RegionSpan
from mmpack.trajectory.actions.find import (
    action_in_sample,
    calls_within,
    found_in,
    read_call,
    screens_as_written,
)
from mmpack.trajectory.actions.formats import Format, get_format
from mmpack.trajectory.actions.parts import THINK, with_kinds, written_turns

SCORE_FIELDS = ("rewards", "verifiers")


def annotate_actions(
    sample: Sample,
    tokenizer: Any,
    format: str | Format = "computer_use",
    *,
    think: tuple[str, str] | None = THINK,
    system: str | None = None,
    scores: str | None = "verifiers",
    malformed: float = 0.0,
    well_formed: float = 1.0,
    required: bool = False,
) -> Sample:
    """The sample with `action_spans`, `region_spans`, scores `action_format`, and loss spans by kind.

    Args: as `find_actions`. A sample that has no `coordinate_system` gets the one that points are written in.
    `scores`: where the scores go: `rewards` (the policy is paid), `verifiers` (it is not), None (nowhere).
    What the sample has already stays: a sample of which each new turn is annotated, and one that is annotated twice,
    has everything once.
    Returns: a copy. Raises: ArgumentError, also for points in no known system, and boxes in none.
    """
    form = get_format("annotate_actions", format)
    if scores is not None:
        check_name("annotate_actions", "scores", scores, SCORE_FIELDS)
    check_number("annotate_actions", "malformed", malformed)
    check_number("annotate_actions", "well_formed", well_formed)
    turns = list(written_turns("annotate_actions", sample, tokenizer, form, think))
    out = with_kinds(sample, turns)
    system = system_written("annotate_actions", sample, system)
    values = (float(malformed), float(well_formed))
    found = found_in(sample, turns, form, system, values, bool(required))
    if any(name in span.action for span in found.spans for name in ("point", "to")):
        if system is None:
            raise ArgumentError(
                f"annotate_actions: the coordinate system of {sample.family}'s points is not known (MM308). "
                "Fix: pass system='absolute_pixels', 'normalized_1000' or 'normalized_1'"
            )
        if sample.coordinate_system is None:
            out = to_system(out, system)
    actions = list(sample.action_spans or ())
    known = {(span.start, span.stop) for span in actions}
    actions += [span for span in found.spans if (span.start, span.stop) not in known]
    out.action_spans = actions or None
    out.region_spans = _with_regions(sample.region_spans, found.regions) or None
    if scores is not None:
        setattr(out, scores, _with(getattr(sample, scores), found.scores) or None)
    return out


def check_actions(
    samples: Sample | Iterable[Sample],
    tokenizer: Any,
    format: str | Format = "computer_use",
    *,
    system: str | None = None,
) -> list[Problem]:
    """The action spans whose tokens decode to no action, to several, or to another one than they say (MM210).

    Args: as `find_actions`. Spans whose action has no `kind` are of another vocabulary: they are left out.
    Raises: ArgumentError for arguments of a wrong type.
    """
    form = get_format("check_actions", format)
    samples = [samples] if isinstance(samples, Sample) else as_samples(samples, "check_actions")
    return [p for sample in samples for p in _misread(sample, tokenizer, form, system)]


def _misread(sample: Sample, tokenizer: Any, form: Format, system: str | None) -> Iterable[Problem]:
    system = system_written("check_actions", sample, system)
    screens = screens_as_written(sample, system)
    for i, span in enumerate(sample.action_spans or ()):
        if "kind" not in span.action or not 0 <= span.start <= span.stop <= len(sample):
            continue  # rules of `validate`
        text = token_text(sample.input_ids, tokenizer, span.start, span.stop).text
        calls = list(calls_within(text, form))
        why = ""
        try:
            said = read_action(span.action)
            if len(calls) != 1:
                why = f"decodes to {len(calls)} actions"
            else:
                _, action = read_call(text, calls[0], form)
                action = action_in_sample(sample, action, screens.before(span.start), system)
                if not _alike(action, said):
                    why = f"decodes to {action.kind}, says {said.kind}"
                    why += ", with other fields" if action.kind == said.kind else ""
        except TraceError as error:
            why = f"decodes to no action: {error.where} {error.why}"
        if why:
            field, at = f"action_spans[{i}]", (span.start, span.stop)
            yield Problem("MM210", sample.sample_id, field, why, at)


def _alike(one: Action, two: Action) -> bool:
    """Equal, but for what conversions round of points."""
    a, b = ({**action.to_dict(), "point": 0, "to": 0} for action in (one, two))
    points, others = one.points(), two.points()
    return (
        a == b
        and points.keys() == others.keys()
        and all(np.allclose(points[name], others[name], rtol=1e-9, atol=0) for name in points)
    )


def _with(old: list[Any] | None, new: list[Any]) -> list[Any]:
    """`old`, then what of `new` is not among it."""
    known = {canonical_json(item.to_dict()) for item in old or ()}
    return [*(old or ()), *(item for item in new if canonical_json(item.to_dict()) not in known)]


def _with_regions(old: list[RegionSpan] | None, new: list[RegionSpan]) -> list[RegionSpan]:
    """`old`, then those of `new` whose tokens and field are not among it."""
    known = {(r.start, r.stop, r.metadata.get("field")) for r in old or ()}
    return [*(old or ()), *(r for r in new if (r.start, r.stop, r.metadata["field"]) not in known)]
