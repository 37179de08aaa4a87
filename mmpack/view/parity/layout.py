"""What each token of a sample is, and where two samples begin to differ. Token indices, half-open spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mmpack.parity.causes.pair import Pair, Side

KINDS = ("text", "image", "video", "loss", "observation", "placeholder", "audio")
TEXT, IMAGE, VIDEO, LOSS, OBSERVATION, PLACEHOLDER, AUDIO = range(7)
_OF_MODALITY = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


def kinds(side: Side) -> np.ndarray:
    """int8 [L]: index into KINDS; `placeholder`: no span claims it, or one in the loss."""
    out = np.full(len(side), TEXT, dtype=np.int8)
    out[side.observed] = OBSERVATION
    out[side.loss] = LOSS
    out[side.placeholder] = PLACEHOLDER
    for span in side.sample.modality_spans:
        inside = slice(span.start, span.stop)
        out[inside] = np.where(
            side.placeholder[inside] & ~side.loss[inside],
            _OF_MODALITY[span.modality],
            out[inside],
        )
    return out


def pieces(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, stop, value) of each run of equal values [L]."""
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(bounds) if a < b]


def first_difference(pair: Pair) -> tuple[int | None, str]:
    """The first token that has another id, else another position, else is in only one loss; and which of these."""
    left, right = pair.sides
    shorter = min(len(left), len(right))
    unlike = left.ids[:shorter] != right.ids[:shorter]
    if unlike.any() or len(left) != len(right):
        return (int(np.argmax(unlike)) if unlike.any() else shorter), "ids"
    a, b = left.sample.position_ids, right.sample.position_ids
    if a is not None and b is not None and a.shape == b.shape and (a != b).any():
        return int(np.argmax((a != b).any(axis=0))), "positions"
    for mine, other, what in (
        (left.loss, right.loss, "loss"),
        (kinds(left), kinds(right), "spans"),
    ):
        if (mine != other).any():
            return int(np.argmax(mine != other)), what
    return None, ""


def decoded(
    side: Side, start: int, stop: int, decode: Callable[[Sequence[int]], str] | None
) -> str:
    """Tokens [start, stop) as text, else as ids; runs of placeholders as their count."""
    parts = []
    for a, b, marked in pieces(side.placeholder[start:stop].astype(np.int8)):
        ids = side.ids[start + a : start + b].tolist()
        if marked:
            run = int(np.searchsorted(side.runs.starts, start + a, side="right")) - 1
            name = side.runs.modalities[run]
            parts.append(f"[{name} × {b - a}]")
        else:
            parts.append(decode(ids) if decode else " ".join(map(str, ids)))
    return (" " if decode is None else "").join(parts)
