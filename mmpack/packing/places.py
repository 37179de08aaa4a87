"""Where the loss tokens of each turn, span and region lie on the loss axis [N]: on the host, so that no GPU is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WIDE = 1 << 32  # more than turns and tokens: both fit into one key with a number before them


@dataclass(frozen=True, eq=False)
class LossPlaces:
    """The loss axis as runs: neighbouring loss tokens of one sample and one turn. All int64."""

    offsets: np.ndarray  # [B+1], as cu_loss
    # [R, 5]: sample, turn (-1: none), first token of the sample, start and stop on the loss axis
    runs: np.ndarray
    regions: np.ndarray  # [regions, 3]: sample, start, stop on the loss axis
    # runs only for scores of turns
    more: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.int64))

    @classmethod
    def of(
        cls, offsets: np.ndarray, turn: np.ndarray, token: np.ndarray, regions: np.ndarray
    ) -> LossPlaces:
        """From cu_loss [B+1], the turn and the token of the sample of each loss token [N], and regions [·, 3]."""
        offsets, turn, token = (np.asarray(x, dtype=np.int64) for x in (offsets, turn, token))
        sample = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        begins = np.ones(len(token), dtype=bool)
        begins[1:] = (
            (sample[1:] != sample[:-1]) | (turn[1:] != turn[:-1]) | (token[1:] != token[:-1] + 1)
        )
        start = np.flatnonzero(begins)
        stop = np.append(start[1:], len(token))[: len(start)]
        runs = np.stack([sample[start], turn[start], token[start], start, stop], axis=1)
        return cls(offsets, runs, np.asarray(regions, dtype=np.int64).reshape(-1, 3))
