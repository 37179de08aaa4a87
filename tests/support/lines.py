"""Random lines of packed rows: what each row sees of the others, by its path, a window and two-way blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from mmpack.ops.attention import AttentionPlan, plan_attention, plan_of_rule


class Line(NamedTuple):
    until: np.ndarray  # int32 [T]
    start: np.ndarray
    padding: np.ndarray
    above: list  # of each row, its path from the root, itself last
    block: np.ndarray  # number of the row's block, -1: text

    def sees(self, window=None, two_way=False):
        """bool [T, T], pair by pair."""
        size = len(self.until)
        seen = np.zeros((size, size), dtype=bool)
        for q in range(size):
            for k in self.above[q]:
                seen[q, k] = True
            if two_way and self.block[q] >= 0:
                seen[q, self.block == self.block[q]] = True
            for k in np.flatnonzero(seen[q]):
                if window is not None and len(self.above[q]) - len(self.above[k]) >= window:
                    seen[q, k] = False
        return seen


def lay(segments, padding=0):
    """Segments in depth-first order: (depth, pieces); a piece is a count of text rows, or a block's, negative."""
    above, block, until = [], [], []
    ends, stack = {}, []
    for number, (depth, pieces) in enumerate(segments):
        stack = stack[:depth]
        path = list(above[stack[-1][1]]) if stack else []
        begin = len(above)
        for piece in pieces:
            own = len(above) if piece < 0 else -1
            for _ in range(abs(piece)):
                path = [*path, len(above)]
                above.append(path)
                block.append(own)
        stack.append((number, len(above) - 1))
        for n, _ in stack:
            ends[n] = len(above)
        until += [number] * (len(above) - begin)
    until = [ends[n] for n in until]
    total = len(until)
    for i in range(padding):
        above.append([total + i])
        block.append(-1)
        until.append(total + i + 1)
    start = np.array([b if b >= 0 else i for i, b in enumerate(block)])
    return Line(
        np.array(until, dtype=np.int32),
        start.astype(np.int32),
        np.arange(len(until)) >= total,
        above,
        np.array(block),
    )


@st.composite
def lines(draw_, longest=6):
    segments, depth = [], 0
    for number in range(draw_(st.integers(1, 6))):
        depth = draw_(st.integers(0, depth)) if number else 0
        size = st.integers(1, longest)
        pieces = draw_(st.lists(size | size.map(lambda n: -n), min_size=1, max_size=4))
        segments.append((depth, pieces))
        depth += 1
    return lay(segments, draw_(st.integers(0, 3)))


windows = st.none() | st.integers(1, 12)
TREES = lay(
    [(0, [3, -4, 2]), (1, [2, -3, -2, 5]), (2, [1]), (2, [-5, 1]), (1, [9]), (0, [-2, 4])], 3
)


def plan_of(line: Line, window: int | None, two_way: bool) -> AttentionPlan:
    plan = plan_attention(line.until, line.padding, line.start)
    return plan if window is None and not two_way else plan_of_rule(plan, window, two_way)
