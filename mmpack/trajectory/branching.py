"""`branches`: how the context of each turn relates to what came before it, token by token and picture by picture.

A context goes on from a history if it begins with all of it. Where it does not, the two part at a position.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.families import FAMILIES
from mmpack.layout.occurrences import context_ids, match_runs, medium_key
from mmpack.layout.runs import placeholder_runs
from mmpack.trajectory.replay import first_other_route
from mmpack.trajectory.samples import Node, linked
from mmpack.trajectory.trajectory import Trajectory, Turn

KINDS = ("first", "goes_on", "sibling", "fork", "rewritten", "routes")
PARTED = ("fork", "rewritten", "routes")  # begin a sample of their own, by another context
_SAID = {
    "first": "has nothing in common with an earlier turn",
    "goes_on": "goes on from turn {0.parent}",
    "sibling": "has the context of turn {0.other}",
    "routes": "goes on from turn {0.other} by its ids, with other routes from token {0.position} on",
}
_ANCHORS = 256  # places at which the rest of a history is looked for


@dataclass(frozen=True)
class Branch:
    """A turn, the turn that it goes on from, and the earlier one that its context has most in common with.

    kind:
        first: nothing in common with an earlier turn.
        goes_on: the context begins with the context and the response of `parent`, as no earlier one does.
        sibling: the context of `other`, exactly: several completions of one prompt, or one sampled again.
        fork: another context from `position` on, where no answer was: another observation, another prompt, a window.
        rewritten: at `position` the history has an id that the policy sampled, and the context has another one: the
            answer was rendered anew, tokenized anew or edited.
        routes: ids and media go on, but the experts that they took are others from `position` on.
    """

    turn: int
    kind: str
    parent: int | None  # the last turn whose whole history begins this context, routes included
    other: int | None
    position: int  # tokens that context and history of `other` have in common, media included
    # fork, rewritten: ids of the history from `position` on that are not in the context, and what stands in their
    # place. The rest of the history follows there; None: it does not come back
    removed: int = 0
    put: int | None = 0
    # of the turn that sampled the history's id at `position`, and its place in that response
    answer: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.kind in _SAID:
            return f"turn {self.turn} " + _SAID[self.kind].format(self)
        where = f"turn {self.turn} parts from turn {self.other} at token {self.position}"
        if self.answer is not None:
            whose = (
                "its answer" if self.answer[0] == self.other else f"the answer of {self.answer[0]}"
            )
            where += f" ({self.answer[1]} of {whose})"
        if self.put is None:
            return f"{where}: {self.removed} ids of the history are not in the context"
        return f"{where}: {self.removed} ids of the history, {self.put} in the context"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        out = asdict(self)
        return out | {"answer": None if self.answer is None else list(self.answer)}


def branches(trajectory: Trajectory) -> list[Branch]:
    """Return how each turn relates to the turns before it, in their order.

    Nothing is glued: only a turn that goes on is in one sample with its parent. All others begin a sample of their own,
    which a pack with `share_prefix=True` computes from `position` on.

    Raises: ArgumentError; LayoutError (MM106) where a context's placeholders and its media contradict each other.

    Example: the third prompt holds the first answer as the tokenizer writes it, 4 5 as 45.
        >>> from mmpack.trajectory import Trajectory, Turn, branches
        >>> turns = [Turn([1, 2], [3, 4, 5, 6]), Turn([1, 2], [7]), Turn([1, 2, 3, 45, 6, 8], [9])]
        >>> for branch in branches(Trajectory("e", "task", "qwen2_5_vl", turns)):
        ...     print(branch.kind, branch)
        first turn 0 has nothing in common with an earlier turn
        sibling turn 1 has the context of turn 0
        rewritten turn 2 parts from turn 0 at token 3 (1 of its answer): 2 ids of the history, 1 in the context
    """
    if not isinstance(trajectory, Trajectory):
        raise ArgumentError(
            f"branches: trajectory is {kind_of(trajectory)}, expected Trajectory. Fix: pass one at a time"
        )
    turns, nodes = trajectory.turns, linked(trajectory.turns)
    rows = _rows(trajectory, nodes)
    return [_branch(k, turns, nodes, rows) for k in range(len(turns))]


def _rows(trajectory: Trajectory, nodes: list[Node]) -> list[np.ndarray]:
    """int64 [C + R] per turn: its ids, and below 0 at placeholders, one number per medium."""
    family, numbers = FAMILIES[trajectory.family], {}  # type: ignore[var-annotated]
    out = []
    for k, (turn, node) in enumerate(zip(trajectory.turns, nodes, strict=True)):
        ids = turn.input_ids.copy()
        runs = placeholder_runs(context_ids(ids, node.sampled, family), family)
        where = f"branches: {trajectory.trajectory_id!r:.60} turn {k}"
        for medium, places in match_runs(runs, turn.media, family, where):
            number = numbers.setdefault(medium_key(medium), -1 - len(numbers))
            for start, stop in places:
                ids[start:stop] = number
        out.append(ids)
    return out


def _branch(k: int, turns: list[Turn], nodes: list[Node], rows: list[np.ndarray]) -> Branch:
    path = nodes[k].path
    parent = path[-2] if len(path) > 1 else None
    context = rows[k][: len(turns[k].context_ids)]
    common = [_common(context, rows[j]) for j in range(k)]
    if not any(common):
        return Branch(k, "first", None, None, 0)
    most = max(common)
    others = [j for j in range(k) if common[j] == most]
    same = [j for j in range(k) if common[j] == len(context) == len(turns[j].context_ids)]
    if same:
        return Branch(k, "sibling", parent, same[-1], len(context))
    whole = [j for j in others if len(turns[j]) == most]
    children = [
        j
        for j in range(k)
        if len(nodes[j].path) > 1 and nodes[j].path[-2] == parent and len(turns[j]) > most
    ]
    if parent is not None and parent in whole:
        if not children:
            return Branch(k, "goes_on", parent, parent, len(turns[parent]))
        others = children
    elif whole:
        at = first_other_route(turns[whole[-1]], turns[k])
        return Branch(k, "routes", parent, whole[-1], at or 0)
    at = common[others[-1]]
    parted = {j: _difference(rows[j][at:], context[at:]) for j in others}
    # of those that have as much in common, one that comes back, and of these the one with the least that is missing
    other = min(others, key=lambda j: (parted[j][1] is None, parted[j][0], -j))
    removed, put = parted[other]
    if at == len(context) or not nodes[other].sampled[at]:
        return Branch(k, "fork", parent, other, at, removed, put)
    author = next(j for j in nodes[other].path if len(turns[j].context_ids) <= at < len(turns[j]))
    answer = (author, at - len(turns[author].context_ids))
    return Branch(k, "rewritten", parent, other, at, removed, put, answer)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading items of two rows are equal."""
    length = min(len(a), len(b))
    unlike = a[:length] != b[:length]
    return int(unlike.argmax()) if unlike.any() else length


def _difference(history: np.ndarray, context: np.ndarray) -> tuple[int, int | None]:
    """Return how much of `history` is not in `context`, and how much replaces it; None if no end of it comes back."""
    if not len(context):
        return len(history), 0
    best, put = 0, None
    for stop in 1 + np.flatnonzero(context == history[-1])[:_ANCHORS]:
        kept = _common(history[::-1], context[:stop][::-1])
        if kept > best:
            best, put = kept, int(stop) - kept
    return len(history) - best, put
