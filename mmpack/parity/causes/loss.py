"""Loss masks that differ over text tokens that are the same on both sides."""

from __future__ import annotations

import numpy as np

from mmpack.layout.runs import true_runs
from mmpack.parity.causes.pair import EDGE, Hit, Pair, possible
from mmpack.parity.causes.turns import turns
from mmpack.parity.fixes import UNKNOWN


def loss_hits(pair: Pair) -> list[Hit]:
    """One hit for each cause: an edge off by one or two, or text of others in the loss (loss_mask_shift); a turn that
    one side leaves out (turn_without_loss); and the rest.
    """
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
    moved = [m - n if text_differs and start >= n - tail else 0 for start, _ in cuts]
    one_sided = len({bool(pair.text_loss[0][start]) for start, _ in cuts}) == 1
    hits: dict[str, Hit] = {}
    for (start, stop), offset in zip(cuts, moved, strict=True):
        cause, evidence = _reason(pair, start, stop, offset, one_sided)
        first, last = (int(pair.text_tokens[0][k]) for k in (start, stop - 1))
        shown = ["these tokens in the loss", "these tokens not in the loss"]
        left, right = shown if pair.left.loss[first] else shown[::-1]
        span = (first, last + 1)
        if before := hits.get(cause):
            assert before.span is not None
            both = dict.fromkeys([*before.evidence.split("; "), *evidence.split("; ")])
            span = (before.span[0], last + 1)
            left, right, evidence = before.left, before.right, "; ".join(both)
        hits[cause] = Hit(cause, "loss_spans", evidence, left, right, span[0], span)
    return list(hits.values())


def _in_turn(pair: Pair) -> bool:
    """Whether text and responses both differ, so that spans can only be compared turn by turn."""
    prefix, suffix = pair.common
    inside = [loss[prefix : len(loss) - suffix] for loss in pair.text_loss]
    both = np.concatenate(inside)
    return bool(both.any() and not both.all())


def _reason(pair: Pair, start: int, stop: int, offset: int, one_sided: bool) -> tuple[str, str]:
    """Cause and evidence of text tokens [start, stop) of the rollout that are in only one loss mask.

    `one_sided`: no token is in the other mask alone, as those of a span that moved are.
    """
    right = (start + offset, stop + offset)
    extra = 0 if pair.text_loss[0][start] else 1
    holder, other = ("rollout", "train")[extra], ("train", "rollout")[extra]
    for side, tokens, (a, b) in zip(
        pair.sides, pair.text_tokens, ((start, stop), right), strict=True
    ):
        if side.observed[tokens[a:b]].any():
            return "loss_mask_shift", f"{holder}'s loss covers text of an observation"
    a, b = ((start, stop), right)[extra]
    mask = pair.text_loss[extra]
    before, after = a > 0 and bool(mask[a - 1]), b < len(mask) and bool(mask[b])
    if before and after:
        tokens = pair.text_tokens[1 - extra][slice(*(right, (start, stop))[extra])]
        if any(turn.start in tokens for turn in turns(pair.sides[1 - extra])):
            return "loss_mask_shift", f"{holder}'s loss covers the text between two responses"
        seen = f"{other}'s loss leaves out {_tokens(b - a)} within a response"
        return UNKNOWN, f"{seen}; {possible('loss_mask_shift')}"
    if b - a <= EDGE and before:
        return "loss_mask_shift", f"{holder}'s loss span ends {_tokens(b - a)} later"
    if b - a <= EDGE and after:
        return "loss_mask_shift", f"{holder}'s loss span starts {_tokens(b - a)} earlier"
    if before or after or not one_sided:
        causes = possible("loss_mask_shift", "turn_without_loss")
        return UNKNOWN, f"a part of a span differs; {causes}"
    turn = int(np.count_nonzero(np.diff(mask[:a].astype(np.int8), prepend=0) == 1)) + 1
    return "turn_without_loss", f"response {turn} of {holder} has no loss in {other}"


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"
