"""Samples with their actions written down, and the check of those that are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmpack.errors import ArgumentError, TraceError, check_name, check_number
from mmpack.layout.token_text import token_text
from mmpack.schema.actions import read_action
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.rules import Problem
from mmpack.schema.sample import COORDINATE_SYSTEMS, Sample, as_samples
from mmpack.trajectory.actions.find import calls_within, found_in, read_call, system_of
from mmpack.trajectory.actions.formats import Format, get_format
from mmpack.trajectory.actions.kinds import with_kinds
from mmpack.trajectory.actions.parts import THINK, written_turns

SCORE_FIELDS = ("rewards", "verifiers")


def annotate_actions(
    sample: Sample,
    tokenizer: Any,
    format: str | Format = "computer_use",
    *,
    think: tuple[str, str] | None = THINK,
    coordinate_system: str | None = None,
    scores: str | None = "verifiers",
    malformed: float = 0.0,
    well_formed: float = 1.0,
    required: bool = False,
) -> Sample:
    """The sample with `action_spans`, `region_spans`, scores `action_format`, and loss spans by kind.

    Args: as `find_actions`. `coordinate_system`: in which the policy writes its points, where the sample does not say;
    by default what models of its family write (Qwen2.5-VL absolute pixels, Qwen3-VL 0 to 1000).
    `scores`: where the scores go: `rewards` (the policy is paid), `verifiers` (it is not), None (nowhere).
    What the sample has already stays: a sample of which each new turn is annotated, and one that is annotated twice,
    has everything once.
    Returns: a copy. Raises: ArgumentError, also where points are on a screenshot in no known coordinate system.
    """
    form = get_format("annotate_actions", format)
    if scores is not None:
        check_name("annotate_actions", "scores", scores, SCORE_FIELDS)
    check_number("annotate_actions", "malformed", malformed)
    check_number("annotate_actions", "well_formed", well_formed)
    turns = list(written_turns("annotate_actions", sample, tokenizer, form, think))
    out = with_kinds(sample, turns)
    if coordinate_system is not None:
        check_name("annotate_actions", "coordinate_system", coordinate_system, COORDINATE_SYSTEMS)
        if sample.coordinate_system not in (None, coordinate_system):
            raise ArgumentError(
                f"annotate_actions: coordinate_system is {coordinate_system!r}, the sample's is "
                f"{sample.coordinate_system!r}. Fix: pass the one in which the policy writes, and no boxes of another"
            )
    out.coordinate_system = coordinate_system or system_of(sample)
    found = found_in(out, turns, form, (float(malformed), float(well_formed)), bool(required))
    if found.regions and out.coordinate_system is None:
        raise ArgumentError(
            f"annotate_actions: the actions have points, and what {sample.family} writes them in is not known (MM308). "
            "Fix: pass coordinate_system='absolute_pixels', 'normalized_1000' or 'normalized_1'"
        )
    if not found.regions:
        out.coordinate_system = coordinate_system or sample.coordinate_system
    actions = list(sample.action_spans or ())
    index = {(span.start, span.stop): i for i, span in enumerate(actions)}
    for span in found.spans:
        if (span.start, span.stop) not in index:
            index[span.start, span.stop] = len(actions)
            actions.append(span)
    for region in found.regions:
        span = found.spans[region.metadata["action"]]
        region.metadata["action"] = index[span.start, span.stop]
    out.action_spans = actions or None
    out.region_spans = _with(sample.region_spans, found.regions) or None
    if scores is not None:
        setattr(out, scores, _with(getattr(sample, scores), found.scores) or None)
    return out


def check_actions(
    samples: Sample | Iterable[Sample],
    tokenizer: Any,
    format: str | Format = "computer_use",
) -> list[Problem]:
    """The action spans whose tokens decode to no action, to several, or to another one than they say (MM210).

    Spans whose action has no `kind` are of another vocabulary: they are left out.
    Raises: ArgumentError for arguments of a wrong type.
    """
    form = get_format("check_actions", format)
    samples = [samples] if isinstance(samples, Sample) else as_samples(samples, "check_actions")
    return [p for sample in samples for p in _misread(sample, tokenizer, form)]


def _misread(sample: Sample, tokenizer: Any, form: Format) -> Iterable[Problem]:
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
                if action != said:
                    why = f"decodes to {action.kind}, says {said.kind}"
                    why += ", with other fields" if action.kind == said.kind else ""
        except TraceError as error:
            why = f"decodes to no action: {error.where} {error.why}"
        if why:
            field, at = f"action_spans[{i}]", (span.start, span.stop)
            yield Problem("MM210", sample.sample_id, field, why, at)


def _with(old: list[Any] | None, new: list[Any]) -> list[Any]:
    """`old`, then what of `new` is not among it."""
    known = {canonical_json(item.to_dict()) for item in old or ()}
    return [*(old or ()), *(item for item in new if canonical_json(item.to_dict()) not in known)]
