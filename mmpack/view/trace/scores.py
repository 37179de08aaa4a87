"""Which tokens a reward, a cost or a verdict is about.

Tokens are a bool array [L] of one sample. Loss tokens for a sequence, a turn and a region, as `scatter_rewards` reads
them; the tokens themselves for a region or span outside the loss, which then is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.view.trace.roles import Roles, within

KINDS = {"rewards": "reward", "costs": "cost", "verifiers": "verdict"}


@dataclass(frozen=True)
class Placed:
    """A score, what it is about in words, and the tokens [start, stop) that it is drawn on; empty where it has none."""

    kind: str  # of KINDS
    name: str
    value: float
    scope: str  # "sequence", "turn 3", …
    level: str  # "sequence", "turn", "region", "span"
    start: int
    stop: int
    turn: int | None = None
    note: str = ""

    @property
    def number(self) -> str:
        """The value: rewards bear their sign."""
        signed = self.kind == "reward" and not math.isnan(self.value)
        return f"{self.value:+.4g}" if signed else f"{self.value:.4g}"

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.name} {self.number} ({self.scope}{self.note and ': '}{self.note})"
        )


def placed_scores(sample: Sample, roles: Roles) -> list[Placed]:
    """Every score of the sample: rewards, then costs, then verdicts."""
    return [
        _place(sample, roles, kind, score)
        for field, kind in KINDS.items()
        for score in getattr(sample, field) or ()
    ]


def _place(sample: Sample, roles: Roles, kind: str, score: Any) -> Placed:
    level, at = (
        ("sequence", None) if isinstance(score.scope, str) else next(iter(score.scope.items()))
    )
    scope = level if at is None else f"{level} {list(at) if level == 'span' else at}"
    tokens, note = _tokens(sample, roles, level, at)
    found = np.flatnonzero(tokens)
    start, stop = (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)
    turn = at if level == "turn" else None
    return Placed(kind, score.name, float(score.value), scope, level, start, stop, turn, note)


def _tokens(sample: Sample, roles: Roles, level: str, at: Any) -> tuple[np.ndarray, str]:
    """bool [L], and what is wrong with the scope."""
    nowhere = np.zeros_like(roles.loss)
    if level == "sequence":
        return roles.loss, "" if roles.loss.any() else "no loss token"
    if level == "turn":
        tokens = roles.loss & (roles.turn == at)
        return tokens, "" if tokens.any() else "no loss token of this turn"
    if level == "region":
        regions = sample.region_spans or []
        if at >= len(regions):
            return nowhere, "no such region"
        span = regions[at]
        inside = within(span, len(sample))
    else:
        start = min(max(int(at[0]), 0), len(sample))
        inside = slice(start, min(max(int(at[1]), start), len(sample)))
    nowhere[inside] = True
    if not nowhere.any():
        return nowhere, "no token there"
    return nowhere, "" if roles.loss[inside].any() else "outside the loss"
