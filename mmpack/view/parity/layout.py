"""What each token of a sample is, and where two samples begin to differ. Token indices, half-open spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmpack.parity.causes.pair import Pair, Side
from mmpack.view.forest import pieces

Decode = Callable[[Sequence[int]], str]
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


def unlike(pair: Pair, start: int, stop: int, what: str) -> np.ndarray:
    """bool [stop - start]: token differs in id or kind, or one side lacks it; in `what` positions, by these too."""
    out = np.zeros(stop - start, dtype=bool)
    left, right = pair.sides
    shorter, longer = sorted((len(left), len(right)))
    out[max(shorter - start, 0) : max(longer - start, 0)] = True
    both = slice(start, min(stop, shorter))
    differ = (left.ids[both] != right.ids[both]) | (kinds(left)[both] != kinds(right)[both])
    a, b = left.sample.position_ids, right.sample.position_ids
    if what == "positions" and a is not None and b is not None:
        differ |= (a[:, both] != b[:, both]).any(axis=0)
    out[: len(differ)] |= differ
    return out


def decoded(side: Side, start: int, stop: int, decode: Decode | None) -> str:
    """Tokens [start, stop) as text, else as ids; runs of placeholders as their count."""
    parts = []
    marked = side.placeholder[start:stop]
    for a, b in pieces(marked):
        ids = side.ids[start + a : start + b].tolist()
        if marked[a]:
            run = int(np.searchsorted(side.runs.starts, start + a, side="right")) - 1
            parts.append(f"[{side.runs.modalities[run]} × {b - a}]")
        else:
            parts.append(decode(ids) if decode else " ".join(map(str, ids)))
    return (" " if decode is None else "").join(parts)
