"""MM304 and MM305: rewards and costs, which reach a loss token or are of a turn without loss."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.rules.topic import Found, Topic
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered
from mmpack.schema.turns import span_turns, turn_without_loss, turns_without_loss

SCORES_PAID = ("rewards", "costs")


def problems(sample: Sample, family: Family) -> Found:
    if not (sample.rewards or sample.costs):
        return
    # loss tokens before each token: a scope reaches some if the count rises within it
    before = np.concatenate([[0], np.cumsum(covered(sample.loss_spans, len(sample)))])
    written: dict[int | None, bool] = {}  # turn: whether it has a loss token
    for span, turn in zip(sample.loss_spans, span_turns(sample), strict=True):
        written[turn] = written.get(turn, False) or span.start < span.stop
    silent = turns_without_loss(sample)
    for name in SCORES_PAID:
        for i, score in enumerate(getattr(sample, name) or ()):
            field, scope = f"{name}[{i}]", score.scope
            reaches = any(written.values())
            if isinstance(scope, dict) and "turn" in scope:
                if scope["turn"] not in written:
                    yield "MM304", field, f"is of turn {scope['turn']}, which has no span", None
                    continue
                reaches = written[scope["turn"]]
            elif isinstance(scope, dict):
                if "region" in scope:
                    regions = sample.region_spans or []
                    if scope["region"] >= len(regions):
                        message = f"is of region {scope['region']}, there are {len(regions)}"
                        yield "MM304", field, message, None
                        continue
                    start, stop = regions[scope["region"]].start, regions[scope["region"]].stop
                else:
                    start, stop = scope["span"]
                    if not start < stop <= len(sample):
                        message = f"is of span [{start}, {stop}) of {len(sample)} tokens"
                        yield "MM304", field, message, None
                        continue
                last = len(sample)
                reaches = bool(before[min(start, last)] < before[min(stop, last)])
            reaches = reaches or turn_without_loss(sample, scope, silent) is not None
            if score.value != 0 and not reaches:
                message = f"({score.name!r:.40}) is {score.value:g}, no loss token takes it"
                yield "MM305", field, message, None


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """What is paid for less than the whole sequence is left to `problems`."""
    ok = np.ones(table.rows, bool)
    loss = table.items("loss_spans")
    empty = np.bincount(loss.row, loss.numbers("stop") - loss.numbers("start"), table.rows) == 0
    for name in SCORES_PAID:
        scores = table.items(name)
        partial = [scope not in (None, "sequence") for scope in scores.values("scope")]
        ok[scores.row[np.array(partial, bool)]] = False
        paid = scores.row[scores.numbers("value", 0) != 0]
        ok[paid[empty[paid]]] = False
    return ok


SCORES = Topic(
    codes=("MM304", "MM305"),
    fields=("loss_spans", "turn", *SCORES_PAID),
    problems=problems,
    valid=valid,
)
