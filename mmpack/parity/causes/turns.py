"""Turns of a conversation, as far as ids show: each opens with an id of the family's `turn_ids`.

Roles are ids: the one after that, or, in families with an id per role, that id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.parity.causes.pair import Side


@dataclass(frozen=True)
class Turn:
    start: int  # of its opening token
    stop: int
    role: int


def turns(side: Side) -> list[Turn]:
    """All turns outside of the responses' own text."""
    at = np.flatnonzero(side.openings & ~side.loss)
    at = at[at + 1 < len(side)]
    roles = side.ids[at + (len(side.family.turn_ids) == 1)]
    stops = np.append(at[1:], len(side))[: len(at)]
    of = zip(at.tolist(), stops.tolist(), roles.tolist(), strict=True)
    return [Turn(start, stop, role) for start, stop, role in of]


def system_turn(side: Side) -> Turn | None:
    """The first turn, if its role comes only once, it is no response's, and shows no medium; None if there is none."""
    all_turns = turns(side)
    if len(all_turns) < 3 or not _answered(side, all_turns[1:]):
        return None
    first = all_turns[0]
    if any(turn.role == first.role for turn in all_turns[1:]):
        return None
    inside = slice(first.start, first.stop)
    if side.loss[inside].any() or side.placeholder[inside].any() or side.observed[inside].any():
        return None
    return first


def prompt_of_response(side: Side, token: int) -> bool:
    """Whether a token lies between the opening of a turn and the response that follows in that turn."""
    for turn in turns(side):
        inside = np.flatnonzero(side.loss[turn.start : turn.stop])
        if len(inside) and turn.start <= token <= turn.start + int(inside[0]):
            return True
    return False


def _answered(side: Side, later: list[Turn]) -> bool:
    """Whether another turn lies before that of the first response: the question that the system's turn precedes."""
    return not side.loss[later[0].start : later[0].stop].any()
