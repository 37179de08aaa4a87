"""Turns of a conversation, as far as ids show: each opens with an id of the family's `turn_ids`.

Roles are ids: the one after that, or, in families with an id per role, that id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair, Side
from mmpack.schema.sample import Sample

TELLING = 16  # ids of a response that two don't share by chance


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


def turns_in_order(pair: Pair) -> tuple[list[Hit], Pair] | None:
    """Hits where both sides have the same turns in another order, and the pair with train's in the rollout's order.

    Turns count by their text up to their last special id. What else differs is found in that pair, also where it is
    in the text of turns, if at least as many are equal.
    """
    parts = [_parts(side) for side in pair.sides]
    if len(parts[0]) != len(parts[1]):
        return None
    left: dict[tuple[int, ...], list[int]] = {}
    found: list[int | None] = [None] * len(parts[0])
    for k, (a, b) in enumerate(zip(*parts, strict=True)):
        if a.text == b.text:  # of several alike, the one in its place is no other's
            found[k] = k
        else:
            left.setdefault(b.text, []).append(k)
    for k, part in enumerate(parts[0]):
        if found[k] is None and left.get(part.text):
            found[k] = left[part.text].pop(0)
    equal = [k for k in found if k is not None]
    if equal == sorted(equal) or 2 * len(equal) < len(found):
        return None
    moved = [k for place, k in zip(sorted(equal), equal, strict=True) if k != place]
    if all(parts[1][k].sampled and len(parts[1][k].text) < TELLING for k in moved):
        return None  # short answers that were sampled anew are exchanged by chance
    others = iter(sorted(set(range(len(found))) - set(equal)))
    order = [next(others) if k is None else k for k in found]
    first = next(k for k, place in enumerate(order) if k != place)
    start, stop = parts[0][first].start, parts[0][first].stop
    evidence = (
        f"{len(equal)} of {len(order)} turns are equal, in another order: train's turns "
        + ", ".join(str(k + 1) for k in order[:8])
    )
    shown = f"turn {first + 1}", f"turn {order.index(first) + 1} of rollout"
    evidence += " are rollout's 1, 2, …"
    hit = Hit("turn_order", "input_ids", evidence, *shown, start, (start, stop), start)
    right = _reordered(pair.right.sample, parts[1], order)
    media = [k for k, m in enumerate(pair.right.sample.media) if m is not right.media[k]]
    of_media = [replace(hit, field="media", index=k, span=None) for k in media[:1]]
    return [hit, *of_media], Pair(pair.left.sample, right)


@dataclass(frozen=True)
class _Part:
    """A turn, `end`ing with its last special id; what follows is between turns."""

    start: int
    end: int
    stop: int
    text: tuple[int, ...]
    sampled: bool  # whether the policy wrote a part of it


def _parts(side: Side) -> list[_Part]:
    out = []
    for turn in turns(side):
        ids = side.ids[turn.start : turn.stop]
        special = np.flatnonzero(np.isin(ids, list(side.special_ids)))
        end = turn.start + int(special[-1]) + 1 if len(special) > 1 else turn.stop
        inside = slice(turn.start, end)
        text = side.ids[inside][~side.placeholder[inside]]
        sampled = bool(side.loss[inside].any())
        out.append(_Part(turn.start, end, turn.stop, tuple(text.tolist()), sampled))
    return out


def _reordered(sample: Sample, parts: list[_Part], order: list[int]) -> Sample:
    """The sample with its turns in this order, without positions."""
    pieces = [(0, parts[0].start)]
    for slot, k in zip(parts, order, strict=True):
        pieces += [(parts[k].start, parts[k].end), (slot.end, slot.stop)]
    spans: dict[str, Any] = {}
    for name in ("modality_spans", "loss_spans", "observation_spans"):
        spans[name], at = [], 0
        for start, stop in pieces:
            spans[name] += [
                replace(
                    s, start=max(s.start, start) - start + at, stop=min(s.stop, stop) - start + at
                )
                for s in getattr(sample, name) or []
                if s.start < stop and s.stop > start
            ]
            at += stop - start
    seen = [s.media_index for s in spans["modality_spans"]]
    media = list(dict.fromkeys([*seen, *range(len(sample.media))]))
    place = {old: new for new, old in enumerate(media)}
    spans["modality_spans"] = [
        replace(s, media_index=place[s.media_index]) for s in spans["modality_spans"]
    ]
    return replace(
        sample,
        input_ids=np.concatenate([sample.input_ids[start:stop] for start, stop in pieces]),
        media=[sample.media[k] for k in media if k < len(sample.media)],
        position_ids=None,
        attention_mask=None,
        **spans,
    )
