"""The turn of each loss span in its trajectory: one rule for scores, for turns and for groups of steps.

A turn without loss keeps its place by two empty spans, at the beginning and at the end of what the policy wrote.
"""

from __future__ import annotations

from typing import Any

from mmpack.schema.sample import Sample


def span_turns(sample: Sample) -> list[int | None]:
    """The turn of each of `sample.loss_spans`; None where neither the span nor the sample has one.

    It is the span's own, and `Sample.turn` where the span has none. Producers of a sample per turn count the spans of
    each from 0: where all of them bear one number below `Sample.turn`, that is not a turn of the trajectory, and
    `Sample.turn` is.
    """
    own = [span.turn for span in sample.loss_spans]
    if sample.turn is None:
        return own
    if len(set(own)) == 1 and own[0] is not None and own[0] < sample.turn:
        return [sample.turn] * len(own)
    return [sample.turn if turn is None else turn for turn in own]


def turns_without_loss(sample: Sample) -> dict[int | None, tuple[int, int]]:
    """Tokens [start, stop) that the policy wrote in each turn whose loss spans are all empty, if it wrote any."""
    found: dict[int | None, tuple[int, int]] = {}
    scored = set()
    for span, turn in zip(sample.loss_spans, span_turns(sample), strict=True):
        found[turn] = (found.get(turn, (span.start, 0))[0], span.stop)
        if span.start < span.stop:
            scored.add(turn)
    return {t: (a, b) for t, (a, b) in found.items() if a < b and t not in scored}


def turn_without_loss(
    sample: Sample, scope: Any, turns: dict[int | None, tuple[int, int]]
) -> int | None:
    """Which of `turns`, of `turns_without_loss`, a score's scope is, or lies in; None for none of them."""
    if not turns or not isinstance(scope, dict):
        return None
    if "turn" in scope:
        return scope["turn"] if scope["turn"] in turns else None
    regions = sample.region_spans or []
    if "region" in scope and scope["region"] < len(regions):
        start, stop = regions[scope["region"]].start, regions[scope["region"]].stop
    elif "span" in scope:
        start, stop = scope["span"]
    else:
        return None
    return next((t for t, (a, b) in turns.items() if a <= start < stop <= b), None)
