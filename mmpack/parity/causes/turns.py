"""Turns of a conversation, as far as ids show: each opens with the special id that opens the sample, then its role.

Roles are ids. A sample whose `special_ids` were not recorded has no turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.parity.causes.pair import Side


@dataclass(frozen=True)
class Turn:
    start: int  # of its opening token
    stop: int
    role: int  # the id after it


def turns(side: Side) -> list[Turn]:
    """All turns outside of the responses' own text."""
    if side.opening is None:
        return []
    at = np.flatnonzero((side.ids == side.opening) & ~side.loss)
    at = at[at + 1 < len(side)]
    stops = [*at[1:].tolist(), len(side)]
    return [Turn(int(a), b, int(side.ids[a + 1])) for a, b in zip(at, stops, strict=True)]


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
