"""Loss masks that differ over text tokens that are the same on both sides."""

from __future__ import annotations

import numpy as np

from mmpack.layout.runs import true_runs
from mmpack.parity.causes.pair import EDGE, Hit, Pair, possible
from mmpack.parity.fixes import UNKNOWN


def loss_hits(pair: Pair) -> list[Hit]:
    """At most one hit: loss_mask_shift if every difference is an edge off by one or two, or takes in text of others."""
    prefix, suffix = pair.common
    n, m = (len(tokens) for tokens in pair.text_tokens)
    text_differs = not prefix == n == m
    if text_differs and _in_turn(pair):
        return []
    unlike = np.zeros(n, dtype=bool)
    unlike[:prefix] = pair.text_loss[0][:prefix] != pair.text_loss[1][:prefix]
    tail = suffix if text_differs else 0
    unlike[n - tail :] = pair.text_loss[0][n - tail :] != pair.text_loss[1][m - tail :]
    if not unlike.any():
        return []
    cuts = true_runs(unlike)
    reasons = [
        _reason(pair, start, stop, m - n if text_differs and start >= n - tail else 0)
        for start, stop in cuts
    ]
    first, last = (int(pair.text_tokens[0][k]) for k in (cuts[0][0], cuts[0][1] - 1))
    shown = ["these tokens in the loss", "these tokens not in the loss"]
    if not pair.left.loss[first]:
        shown.reverse()
    known = None not in reasons
    evidence = "; ".join(dict.fromkeys(r for r in reasons if r)) or "a whole span differs"
    return [
        Hit(
            cause="loss_mask_shift" if known else UNKNOWN,
            field="loss_spans",
            evidence=evidence if known else f"{evidence}; {possible('loss_mask_shift')}",
            left=shown[0],
            right=shown[1],
            index=first,
            span=(first, last + 1),
        )
    ]


def _in_turn(pair: Pair) -> bool:
    """Whether text and responses both differ, so that spans can only be compared turn by turn."""
    prefix, suffix = pair.common
    inside = [loss[prefix : len(loss) - suffix] for loss in pair.text_loss]
    both = np.concatenate(inside)
    return bool(both.any() and not both.all())


def _reason(pair: Pair, start: int, stop: int, offset: int) -> str | None:
    """Why text tokens [start, stop) of the rollout are in only one loss mask; None if nothing shows it."""
    right = (start + offset, stop + offset)
    extra = 0 if pair.text_loss[0][start] else 1
    holder = ("rollout", "train")[extra]
    for side, tokens, (a, b) in zip(
        pair.sides, pair.text_tokens, ((start, stop), right), strict=True
    ):
        if side.observed[tokens[a:b]].any():
            return f"{holder}'s loss covers text of an observation"
    a, b = ((start, stop), right)[extra]
    mask = pair.text_loss[extra]
    before, after = a > 0 and bool(mask[a - 1]), b < len(mask) and bool(mask[b])
    if before and after:
        return f"{holder}'s loss covers the text between two responses"
    if b - a <= EDGE and before:
        return f"{holder}'s loss span ends {_tokens(b - a)} later"
    if b - a <= EDGE and after:
        return f"{holder}'s loss span starts {_tokens(b - a)} earlier"
    return None


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"
