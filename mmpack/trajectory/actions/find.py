"""Find, annotate and check the actions that the policy wrote: token spans, points, scores and problems."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, check_flag, check_name, check_number
from mmpack.families import FAMILIES
from mmpack.grounding.samples import moved, system_written, to_system
from mmpack.layout.token_text import token_text
from mmpack.schema.actions import Action, read_action
from mmpack.schema.error_text import trace_error
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.rules import Problem
from mmpack.schema.rules.actions import Screens
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.spans import ActionSpan, RegionSpan, Score
from mmpack.trajectory.actions.formats import get_format
from mmpack.trajectory.actions.parts import THINK, Written, with_kinds, written_turns
from mmpack.trajectory.actions.qwen import Call, Format
from mmpack.trajectory.actions.strict_json import places, read_json

ACTION_FORMAT = "action_format"  # the score's name


@dataclass(frozen=True)
class FoundActions:
    """Result of `find_actions`, in the order of tokens.

    A region is of the action whose tokens hold its own; `metadata["field"]` says which of its points it is. `scores`
    has one score per call, malformed ones included.
    """

    spans: list[ActionSpan] = field(default_factory=list)
    regions: list[RegionSpan] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_actions(
    sample: Sample,
    tokenizer: Any,
    format: str | Format = "computer_use",
    *,
    think: tuple[str, str] | None = THINK,
    system: str | None = None,
    malformed: float = 0.0,
    well_formed: float = 1.0,
    required: bool = False,
) -> FoundActions:
    """The actions that the policy wrote, with their tokens: only loss spans are read, and no thoughts.

    Args: `tokenizer`, `format`, `think`: see `loss_kinds`. `malformed`, `well_formed`: values of the score
    `action_format`, whose scope is the tokens of the call. `required`: a turn without a call is malformed too.
    `system`: what the policy writes points in, by default what models of its family do (Qwen2.5-VL absolute pixels,
    Qwen3-VL 0 to 1000). Points are returned in the sample's `coordinate_system`, or as written where it has none.
    An action is what its format says, with points on the screen: else it is a problem (MM208, MM209, MM211) and a
    score, and no span. Each point of an action is a RegionSpan on the last image before it, over the tokens of its
    numbers, where the sample has such an image.
    Never fails on what a policy wrote, and takes time in proportion to it. Raises: ArgumentError for the arguments, and
    where points need a size to be converted that is not known.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> from mmpack.trajectory import find_actions
        >>> words = [b"Go on.", b'{"kind": "wait",', b' "seconds": 2}', b" Done."]
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", np.arange(4), [], [], [mp.LossSpan(1, 4, turn=0)])
        >>> find_actions(sample, words.__getitem__, "json").spans[0].to_dict()
        {'start': 1, 'stop': 3, 'action': {'kind': 'wait', 'seconds': 2.0}, 'turn': 0}
    """
    form = get_format("find_actions", format)
    check_number("find_actions", "malformed", malformed)
    check_number("find_actions", "well_formed", well_formed)
    check_flag("find_actions", "required", required)
    turns = list(written_turns("find_actions", sample, tokenizer, form, think))
    written = system_written("find_actions", sample, system)
    values = (float(malformed), float(well_formed))
    return found_in(sample, turns, form, written, values, bool(required))


def found_in(
    sample: Sample,
    turns: list[Written],
    form: Format,
    system: str | None,
    values: tuple[float, float],
    required: bool,
) -> FoundActions:
    """Return the actions of turns, as `find_actions` does.

    Args: `system`: what is written. `values`: of malformed and well-formed calls.
    """
    out = FoundActions()
    screens = screens_as_written(sample, system)
    for turn in turns:
        for call in turn.calls:
            start, stop = turn.text.span(call.start, call.stop)
            scope: dict[str, Any] = {"span": [start, stop]}
            try:
                value, action = read_call(turn.text.text, call, form)
                message = screens.outside(action, start)
                fault = ("MM209", message) if message else None
                if fault is None:
                    media_index = screens.before(start)
                    action = action_in_sample(sample, action, media_index, system)
            except TraceError as error:
                code = error.code if error.code in ("MM209", "MM211") else "MM208"
                fault = (code, f"{error.where} {error.why}")
            if fault is None:
                out.regions.extend(_regions(turn, call, form, value, action, media_index))
                out.spans.append(ActionSpan(start, stop, action.to_dict(), turn.turn))
                out.scores.append(Score(ACTION_FORMAT, values[1], scope))
            else:
                _refuse(out, sample, scope, values[0], *fault, (start, stop))
        if required and not turn.calls:
            where = (turn.start, turn.stop)
            scope = {"span": list(where)} if turn.turn is None else {"turn": turn.turn}
            _refuse(out, sample, scope, values[0], "MM211", "action is missing", where)
    return out


def read_call(text: str, call: Call, form: Format) -> tuple[Any, Action]:
    """The JSON of a call, and the action that it means. Raises TraceError."""
    if call.fault:
        raise TraceError(call.fault, "MM211", "action", call.fault)
    value = read_json(text[call.json_start : call.json_stop], "action")
    return value, form.read(value, "action")


def screens_as_written(sample: Sample, system: str | None) -> Screens:
    """Return the sample's screens for points that are written in `system`."""
    shown = copy.copy(sample)
    shown.coordinate_system = system
    return Screens(shown, FAMILIES[sample.family])


def action_in_sample(
    sample: Sample, action: Action, media_index: int | None, system: str | None
) -> Action:
    """An action written in `system`, its points in the sample's coordinate system.

    Raises: TraceError (MM209) for a point on no picture whose size is needed; ArgumentError where a size is not known.
    """
    target, points = sample.coordinate_system, action.points()
    if system == target or not points:
        return action
    try:
        to = moved(sample, points, media_index, system, target)
        return read_action(action.to_dict() | {name: list(point) for name, point in to.items()})
    except ArgumentError:
        if media_index is not None:
            raise
    name = next(iter(points))
    why = f"is before the first picture, so that it can't be converted from {system} to {target}"
    raise trace_error(name, why, "MM209")


def _refuse(
    out: FoundActions,
    sample: Sample,
    scope: dict[str, Any],
    value: float,
    code: str,
    why: str,
    span: tuple[int, int],
) -> None:
    problem = Problem(code, sample.sample_id, "action_spans", why, span)
    out.problems.append(problem)
    out.scores.append(Score(ACTION_FORMAT, value, scope, {"code": code, "why": why}))


def _regions(
    turn: Written, call: Call, form: Format, value: Any, action: Action, media_index: int | None
) -> list[RegionSpan]:
    points = action.points()
    if media_index is None or not points:
        return []
    found = places(turn.text.text[call.json_start : call.json_stop])
    out = []
    for name, point in points.items():
        first, last = found[form.place(value, name)]
        span = turn.text.span(call.json_start + first, call.json_start + last)
        out.append(RegionSpan(*span, media_index, point=point, metadata={"field": name}))
    return sorted(out, key=lambda region: region.start)


def calls_within(text: str, form: Format) -> Iterator[Call]:
    """All calls of a text, thoughts aside."""
    call = form.next_call(text, 0)
    while call is not None:
        yield call
        call = form.next_call(text, call.stop)


# ---- annotated samples ---------------------------------------------------------------------------

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
