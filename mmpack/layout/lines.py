"""Multimodal positions [3, T] of many samples side by side, written as lines: a text, or one row of merged patches.

Along a line time and height stand still, or, in a text, all three count on; so each is repeated, and nothing is divided
token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmpack.layout.runs import Runs


class Placed(NamedTuple):
    """Runs of placeholders, with what their positions follow from."""

    runs: Runs  # tokens of all samples, one after the other
    sample: np.ndarray  # int64 [O], rising: which sample has the run
    grids: np.ndarray  # int64 [O, 3], merged patches: time, height, width
    # float [O]: positions between temporal patches, in the precision of the one who is followed
    interval: np.ndarray
    advance: np.ndarray  # int64 [O]: how far the text behind a run is from where the run starts


def placed_runs(
    runs: Runs, sample: np.ndarray, grids: np.ndarray, interval: np.ndarray, rule: str
) -> Placed:
    """Runs with how far the text behind them is. Args as the fields of `Placed`; `rule`: see layout/mrope.py."""
    advance = np.maximum(grids[:, 1], grids[:, 2])
    if rule == "max":
        last = ((grids[:, 0] - 1).astype(interval.dtype) * interval).astype(np.int64)
        advance = np.maximum(advance, last + 1)
    return Placed(runs, sample, grids, interval, advance)


def positions_of_lines(
    offsets: np.ndarray, placed: Placed, out: np.ndarray | None = None
) -> np.ndarray:
    """int64 [3, T], in `out` if given: time, height, width. Args: `offsets`: int64 [B+1], tokens of sample b are [b],
    [b+1).
    """
    length, runs = int(offsets[-1]), placed.runs
    # each sample begins with an empty run; behind each run there is a text, maybe an empty one
    at = placed.sample + np.arange(1, len(runs) + 1)
    start, stop, gain, lines, height, width = np.zeros((6, len(at) + len(offsets) - 1), np.int64)
    heads = np.ones(len(start), bool)
    heads[at] = False
    start[heads] = stop[heads] = offsets[:-1]
    start[at], stop[at] = runs.starts, runs.stops
    gain[at] = placed.advance - (runs.stops - runs.starts)
    height[at], width[at] = placed.grids[:, 1], placed.grids[:, 2]
    lines[at] = placed.grids[:, 0] * placed.grids[:, 1]
    shift = gain.cumsum()  # of the text behind each run
    shift -= (shift[heads] + offsets[:-1])[heads.cumsum() - 1]

    # of each line, those of a run before its text: its tokens, the position of its first, its place in the run
    ends = (lines + 1).cumsum()
    texts = ends - 1
    run = np.arange(len(start)).repeat(lines + 1)
    tokens, first = width[run], (start + shift - gain)[run]
    tokens[texts[:-1]] = start[1:] - stop[:-1]
    tokens[texts[-1:]] = length - stop[-1:]
    first[texts] = stop + shift
    rows = np.arange(len(run)) - (texts - lines)[run]  # of merged patches, within the run
    times = first.copy()
    if placed.grids[:, 0].max(initial=1) > 1:
        frame, rows = np.divmod(rows, np.maximum(height, 1)[run])
        interval = np.ones(len(start), placed.interval.dtype)
        interval[at] = placed.interval
        times += (frame.astype(interval.dtype) * interval[run]).astype(np.int64)
        times[texts] = first[texts]
    rows += first
    rows[texts] = first[texts]

    out = np.empty((3, length), np.int64) if out is None else out
    out[:2] = _is_text(runs, length)
    out[2] = 1
    held = tokens.nonzero()[0]
    begin = (tokens.cumsum() - tokens)[held]
    counted = tokens - 1  # from a line's first token to its last
    in_texts = np.zeros_like(counted)
    in_texts[texts] = counted[texts]
    count_on(out[0], begin, times[held], in_texts[held])
    count_on(out[1], begin, rows[held], in_texts[held])
    count_on(out[2], begin, first[held], counted[held])
    return out


def count_on(steps: np.ndarray, begin: np.ndarray, first: np.ndarray, gained: np.ndarray) -> None:
    """Sum `steps` int64 [T] in place, so that each line starts with its `first`; temporary arrays of [T] take longer.

    Args: `begin`: int64 [n], where lines of one token or more begin; `gained`: how much each adds up to within.
    """
    step = first.copy()
    step[1:] -= (first + gained)[:-1]
    steps[begin] = step
    np.cumsum(steps, out=steps)


def _is_text(runs: Runs, length: int) -> np.ndarray:
    """int8 [length]: 1 of a text, 0 of a placeholder."""
    steps = np.zeros(length + 1, np.int8)
    steps[0] = 1
    steps[runs.starts] -= 1
    steps[runs.stops] += 1
    return steps.cumsum(dtype=np.int8)[:length]
