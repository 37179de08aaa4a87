"""Ids around a conversation: pad ids at the ends of the ids, and ids before the first turn, such as BOS.

Where the two sides differ by them, what lies between is compared by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpack.parity.causes.cut import cut_at_left, part, shifted
from mmpack.parity.causes.pair import Hit, Pair, Side, first_run, show_ids

_REPEATED = 4  # an id that is not special is padding where it stands so often in a row
Bounds = list[tuple[int, int]]  # of each side, the tokens [start, stop) within its edges


@dataclass(frozen=True)
class Edges:
    """The hits, and the pair within the edges."""

    hits: list[Hit]
    inner: Pair
    start: int  # the rollout's token at which it starts
    shift: bool  # whether it starts at another one in train

    def moved(self, hit: Hit) -> Hit:
        """A hit of the inner pair, counted in the rollout's own tokens."""
        return shifted(hit, self.start)


def edges(pair: Pair) -> Edges:
    """Find what only one side has around the conversation."""
    pads = [_pads(pair, at_left) for at_left in (True, False)]
    kept = [(a, len(s) - b) for s, a, b in zip(pair.sides, *pads, strict=True)]
    hits = []
    inner = pair
    if any(map(any, pads)):
        hits.append(_padding(pair, kept))
        inner = _within(pair, kept)
    heads = [side.ids[: side.head] for side in inner.sides]
    if not np.array_equal(heads[0], heads[1]):
        begun = [(start + len(head), b) for (start, b), head in zip(kept, heads, strict=True)]
        bare = _within(pair, begun)
        if _begin_alike(bare):
            hits.append(_first(inner, heads, kept[0][0]))
            inner, kept = bare, begun
    return Edges(hits, inner, kept[0][0], kept[0][0] != kept[1][0])


def _within(pair: Pair, kept: Bounds) -> Pair:
    left, right = (
        part(side.sample, *bounds, [*range(len(side.sample.media))])
        for side, bounds in zip(pair.sides, kept, strict=True)
    )
    return Pair(left, right)


def _pads(pair: Pair, at_left: bool) -> tuple[int, int]:
    """How many pad ids of each side, at one end, the other has not."""
    ends = [side.ids if at_left else side.ids[::-1] for side in pair.sides]
    runs = [first_run(ids == ids[:1]) for ids in ends]
    common = min(runs) if np.array_equal(ends[0][:1], ends[1][:1]) else 0
    one, two = (_surplus(s, n, common, at_left) for s, n in zip(pair.sides, runs, strict=True))
    return one, two


def _surplus(side: Side, run: int, common: int, at_left: bool) -> int:
    """How many of the `run` equal ids at one end, beyond those that both sides have, are padding.

    Ids in the loss were sampled, text is not repeated so often, and a single id at the right may be a stop token.
    """
    extra = run - common
    if not extra or run == len(side):
        return 0
    edge = slice(0, extra) if at_left else slice(len(side) - extra, len(side))
    pad, family = int(side.ids[edge][0]), side.family
    sampled = int(side.loss[edge].sum())
    marks = (*family.first_ids, *family.turn_ids, *family.starts, *family.ends)
    if pad in marks or pad in family.placeholder_ids.values():
        return 0
    if pad == family.pad_token_id and sampled > 1:
        return extra
    known = pad == family.pad_token_id and (at_left or run > 1)
    least = 1 if known else 2 if pad in side.special_ids else _REPEATED
    extra -= sampled
    return extra if extra >= least and sampled <= 1 else 0


def _padding(pair: Pair, kept: Bounds) -> Hit:
    shown = []
    for side, (start, stop) in zip(pair.sides, kept, strict=True):
        ends = ((start, "left", 0), (len(side) - stop, "right", -1))
        counts = [f"{n} on the {where} (id {side.ids[k]})" for n, where, k in ends if n]
        shown.append(f"pad ids: {', '.join(counts) or 'none'}")
    at_left = any(start for start, _ in kept)
    span = (0, kept[0][0]) if at_left else (kept[0][1], len(pair.left))
    evidence = (
        f"input_ids hold padding that the other side has not; rollout {shown[0]}; train {shown[1]}"
    )
    return Hit("padding_in_ids", "input_ids", evidence, shown[0], shown[1], span[0], span, span[0])


def _begin_alike(bare: Pair) -> bool:
    """Whether both go on with one first turn: else the ids before it went with what was cut off."""
    a, b = (side.ids[:1] for side in bare.sides)
    return len(a) > 0 and np.array_equal(a, b) and not cut_at_left(bare)


def _first(pair: Pair, heads: list[np.ndarray], start: int) -> Hit:
    names: dict[int, str] = {}
    for side in pair.sides:
        known = side.setting("tokenizer", "special_ids")
        known = known.items() if isinstance(known, dict) else ()
        names |= {i: str(name) for name, i in known if type(i) is int}
    shown = [
        ", ".join(f"{i} {names.get(i, '')}".rstrip() for i in head.tolist()) or "none"
        for head in heads
    ]
    evidence = (
        f"ids before the first turn: rollout {shown[0]}; train {shown[1]}; then both go on alike"
    )
    span = (start, start + len(heads[0]))
    one, two = map(show_ids, heads)
    return Hit("bos", "input_ids", evidence, one, two, start, span, start)
