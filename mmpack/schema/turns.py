"""The turn of each loss span in its trajectory: one rule for scores, for turns and for groups of steps."""

from __future__ import annotations

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
