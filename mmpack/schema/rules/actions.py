"""MM207 to MM209, MM212: actions, which the policy wrote, on the screen. Those without a `kind` are free objects."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from mmpack.errors import TraceError
from mmpack.families import Family
from mmpack.schema.actions import Action, read_action
from mmpack.schema.codes import Found
from mmpack.schema.rules.places import limits_of, place_faults
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ActionSpan, covered


def problems(sample: Sample, family: Family) -> Found:
    if not sample.action_spans:
        return
    loss = np.concatenate([[0], np.cumsum(covered(sample.loss_spans, len(sample)))])
    turns: list[tuple[int, int, int]] = sorted(
        (s.start, s.stop, s.turn) for s in sample.loss_spans if s.turn is not None
    )
    screens = Screens(sample, family)
    starts = np.array([start for start, _, _ in turns], np.int64)
    for i, span in enumerate(sample.action_spans):
        field, at = f"action_spans[{i}]", (span.start, span.stop)
        if span.start <= span.stop <= len(sample):
            outside = span.stop - span.start - int(loss[span.stop] - loss[span.start])
            if outside and (outside < span.stop - span.start or not _is_past(sample, span)):
                message = f"has {outside} of {span.stop - span.start} tokens in no loss span"
                yield "MM207", field, message, at
            k = int(np.searchsorted(starts, span.start, "right")) - 1
            inside = k >= 0 and span.start < min(span.stop, turns[k][1])
            if inside and span.turn not in (None, turns[k][2]):
                message = f"is of turn {span.turn}, its loss span of turn {turns[k][2]}"
                yield "MM212", field, message, at
        if "kind" in span.action:
            try:
                action = read_action(span.action, "action")
            except TraceError as error:
                yield "MM208", field, f"{error.where} {error.why}", at
                continue
            message = screens.outside(action, span.start)
            if message:
                yield "MM209", field, message, at


class Screens:
    """The screens of a sample: which picture is the last one before a token."""

    def __init__(self, sample: Sample, family: Family):
        self.sample, self.family = sample, family
        images = [s for s in sample.modality_spans if s.modality == "image"]
        self._images = sorted((s.stop, s.media_index) for s in images)

    def before(self, token: int) -> int | None:
        """`media_index` of the last image that ends at or before a token; None where there is none."""
        k = bisect_right(self._images, (token, len(self.sample.media)))
        return self._images[k - 1][1] if k else None

    def outside(self, action: Action, token: int) -> str:
        """Which point of an action at this token is outside of the screen, in words; nothing if none is."""
        system = self.sample.coordinate_system
        if system is None:
            return ""
        limits = limits_of(self.sample, self.family, system, self.before(token))
        for name, point in action.points().items():
            for _, why in place_faults(point, system, limits):
                return f"{name} {why}"
        return ""


def _is_past(sample: Sample, span: ActionSpan) -> bool:
    """Whether the action is of a turn before the sample's own, which another sample holds."""
    return sample.turn is not None and span.turn is not None and span.turn < sample.turn
