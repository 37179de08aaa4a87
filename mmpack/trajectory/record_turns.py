"""Which turns of records are one turn, and what each goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmpack.layout.occurrences import medium_key
from mmpack.trajectory.samples import linked
from mmpack.trajectory.trajectory import Turn

if TYPE_CHECKING:
    from mmpack.trajectory.records import Record


class Made(NamedTuple):
    """A turn, and where it comes from."""

    turn: Turn
    record: int
    last: bool  # of its record


def after_what_they_go_on_from(made: list[Made]) -> list[Made]:
    """In their order, but none before the turn that it goes on from: frameworks list chains by their last answer."""
    out: list[Made] = []
    waiting = list(made)
    while waiting:
        first = waiting[0]
        while True:
            parent = _longest_history(first.turn, [m for m in waiting if m is not first])
            if parent is None or _longest_history(first.turn, [*out, parent]) is not parent:
                break
            first = parent
        out.append(first)
        waiting = [m for m in waiting if m is not first]
    return out


def _longest_history(turn: Turn, among: list[Made]) -> Made | None:
    """The longest of the turns that `turn` goes on from; of equal ones the first."""
    keys = [medium_key(m) for m in turn.media]
    best = None
    for m in among:
        other = m.turn
        if (
            len(other) <= len(turn.context_ids)
            and (best is None or len(other) > len(best.turn))
            and np.array_equal(turn.context_ids[: len(other)], other.input_ids)
            and keys[: len(other.media)] == [medium_key(x) for x in other.media]
        ):
            best = m
    return best


def repeats(turn: Turn, record: int, last: bool, made: list[Made]) -> bool:
    """Whether another record has this turn already."""
    for other in made:
        if other.record == record or (last and other.last):
            continue
        own, before = turn.logprobs, other.turn.logprobs
        if (
            np.array_equal(turn.context_ids, other.turn.context_ids)
            and np.array_equal(turn.response_ids, other.turn.response_ids)
            and [medium_key(m) for m in turn.media] == [medium_key(m) for m in other.turn.media]
            and (own is None or before is None or np.array_equal(own, before))
        ):
            return True
    return False


def replace_resampled(made: list[Made], records: Sequence[Record]) -> None:
    """Take the loss off answers whose prompt was sent again, unless a later prompt goes on from them."""
    nodes = linked([m.turn for m in made])
    parents = {k for node in nodes for k in node.path[:-1]}
    for k, m in enumerate(made):
        again = [j for j in range(k + 1, len(made)) if _sent_again(m, made[j], records)]
        if not again or k in parents:
            continue
        note: dict[str, Any] = {"by": again[-1]}
        if m.turn.rewards:
            note["rewards"] = [[s.name, s.value] for s in m.turn.rewards]
        m.turn.loss_spans, m.turn.rewards = [], None
        m.turn.metadata["replaced"] = note


def _sent_again(first: Made, second: Made, records: Sequence[Record]) -> bool:
    requests = [records[m.record].request for m in (first, second)]
    same = first.record == second.record or (requests[0] is not None and requests[0] == requests[1])
    return (
        not same
        and np.array_equal(first.turn.context_ids, second.turn.context_ids)
        and [medium_key(m) for m in first.turn.media] == [medium_key(m) for m in second.turn.media]
    )
