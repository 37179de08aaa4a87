"""Replay columns of a turn: lists of its response's tokens, routes of all its tokens.

The engine never ran the last token that it sampled: its routes are known from the turn that goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import ArgumentError, TraceError, kind_of
from mmpack.schema.ragged import Ragged, RaggedSpec, TeachersSpec
from mmpack.schema.routes import RoutesSpec

if TYPE_CHECKING:
    from mmpack.schema.sample import Sample
    from mmpack.schema.spans import LossSpan
    from mmpack.trajectory.trajectory import Turn


def check_replay(turn: Turn) -> None:
    """Raise ArgumentError for kept ids, teachers or routes that are none, or not of the turn's tokens."""
    specs = {"kept_ids": RaggedSpec(), "teachers": TeachersSpec(), "routed_experts": RoutesSpec()}
    for name, spec in specs.items():
        value = getattr(turn, name)
        if value is None or spec.holds(value):
            continue
        try:
            spec.read(value, f"Turn: {name}")
        except TraceError as error:
            raise ArgumentError(str(error)) from None
        fix = (
            "Ragged.of(lists, logprobs)"
            if name != "routed_experts"
            else "compact_routes(values, num_experts)"
        )
        raise ArgumentError(f"Turn: {name} is {kind_of(value)}. Fix: pass what {fix} makes")
    lists = {"kept_ids": turn.kept_ids}
    lists |= {f"teachers[{name!r:.40}]": own for name, own in (turn.teachers or {}).items()}
    for name, own in lists.items():
        if own is not None and len(own) != len(turn.response_ids):
            raise ArgumentError(
                f"Turn: {name} has {len(own)} lists for {len(turn.response_ids)} response ids. "
                "Fix: pass one list per response id"
            )
    routes = turn.routed_experts
    if routes is not None and len(routes) != len(turn):
        raise ArgumentError(
            f"Turn: routed_experts has routes for {len(routes)} tokens, but the turn has {len(turn)}. "
            "Fix: pass one row per token of context and response; the last row may hold anything"
        )


def first_other_route(before: Turn, after: Turn) -> int | None:
    """Return the first token of `before` that took other experts in `after`: then one sample can't be both.

    0 if only one of them has routes; None if all are the same.
    """
    a, b = before.routed_experts, after.routed_experts
    if a is None or b is None or a.shape[1:] != b.shape[1:]:
        return None if a is b else 0
    ran = len(before) - 1
    other = (a[:ran] != b[:ran]).any((1, 2))
    return int(other.argmax()) if other.any() else None


def joined_lists(turns: Sequence[Turn], spans: Sequence[Sequence[LossSpan]]) -> dict[str, Any]:
    """`kept_ids` and `teachers` of the sample that holds the loss of `turns`; `spans`: the loss spans of each.

    A teacher that says nothing of a turn has empty lists there. Raises: ArgumentError where only some turns with a loss
    token have kept ids.
    """
    own = [(t, s) for t, s in zip(turns, spans, strict=True) if any(x.start < x.stop for x in s)]
    kept = [_picked(t.kept_ids, t, s) for t, s in own if t.kept_ids is not None]
    names = dict.fromkeys(name for t, _ in own for name in t.teachers or {})
    empty = {id(t): Ragged.empty(len(t.response_ids), scored=True) for t, _ in own}
    teachers = {
        name: Ragged.cat(
            [_picked((t.teachers or {}).get(name, empty[id(t)]), t, s) for t, s in own]
        )
        for name in names
    }
    if kept and len(kept) != len(own):
        raise ArgumentError(
            f"to_samples: {len(kept)} of {len(own)} turns of one sample have kept_ids. "
            "Fix: record them for every turn, or for none"
        )
    return {"kept_ids": Ragged.cat(kept) if kept else None, "teachers": teachers or None}


def _picked(lists: Ragged, turn: Turn, spans: Sequence[LossSpan]) -> Ragged:
    """The lists of the turn's loss tokens."""
    start = len(turn.context_ids)
    return Ragged.cat([lists[s.start - start : s.stop - start] for s in spans])


def routes_with_tail(routes: np.ndarray | None, length: int) -> np.ndarray | None:
    """Routes [length, …]: 0 for what came back after the last response, which no logprob reads."""
    if routes is None or len(routes) == length:
        return routes
    tail = np.zeros((length - len(routes), *routes.shape[1:]), routes.dtype)
    return np.concatenate([routes, tail])


def of_turn(sample: Sample, start: int, stop: int, loss: slice, at: np.ndarray) -> dict[str, Any]:
    """The fields of the turn [start, stop) of a sample. `loss`: its loss tokens; `at`: where they lie in the response.

    Tokens of the response without loss have empty lists.
    """
    kept, teachers, routes = sample.kept_ids, sample.teachers, sample.routed_experts
    count = stop - start
    return {
        "kept_ids": None if kept is None else kept[loss].spread(at, count),
        "teachers": teachers
        and {name: own[loss].spread(at, count) for name, own in teachers.items()},
        "routed_experts": None if routes is None else np.ascontiguousarray(routes[:stop]),
    }
