"""The tokens of a sample as rows of HTML: what they are, their text, and the scores that end at them.

A piece is one element. How long its tokens are, their ids and their logprobs are packed into its attributes, so that a
token costs some four bytes more than its text; the page's script makes elements of tokens when a row is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.view.pages import Markup, escape, template
from mmpack.view.trace.episodes import Node
from mmpack.view.trace.roles import (
    LETTERS,
    NO_TURN,
    OF_MODALITY,
    ROLES,
    Row,
    edges_of,
    repeats,
    rows_of,
    visible,
)
from mmpack.view.trace.scores import Placed

FOLDED = 8  # equal tokens in a row that become one
HEAD = 96  # tokens of a row outside the loss that are seen before it is opened
ROW_HEAD, ROW_TAIL = 1536, 512  # tokens that are drawn of such a row
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
LONGEST = len(DIGITS) - 1  # of a length in one digit: this digit says that the next one goes on


@dataclass(frozen=True, eq=False)
class Written:
    """What the rows of a sample are written from."""

    node: Node
    texts: list[str] | None
    scores: Sequence[Placed]
    logprobs: np.ndarray | None  # float [L], NaN where there is none
    # int64 [L], how many ids the sampler kept; -1 where that is not known
    kept: np.ndarray | None = None


def rows(written: Written) -> Markup:
    """Rows from the first token that no other sample drew."""
    node = written.node
    sample = node.sample
    near = [s for s in written.scores if s.level in ("region", "span")]
    edges = edges_of([*(sample.region_spans or ()), *(sample.action_spans or ()), *near])
    found = rows_of(node.roles, node.shared, edges)
    ends: dict[int, list[Placed]] = {}
    for score in written.scores:
        if score.level != "sequence" and score.stop > node.shared:
            ends.setdefault(score.stop, []).append(score)
    return Markup(_makes().rows([_row(written, row, ends) for row in found]))


def _makes() -> Any:
    return template("trace.html")


def logprobs_of(sample: Sample) -> np.ndarray | None:
    """float32 [L]; None where they are not recorded, or not one per loss token."""
    recorded = sample.rollout_logprobs
    indices = sample.loss_indices
    if recorded is None or len(recorded) != len(indices):
        return None
    out = np.full(len(sample), np.nan, np.float32)
    inside = indices >= 0
    out[indices[inside]] = recorded[inside]
    return out


def kept_of(sample: Sample) -> np.ndarray | None:
    """int64 [L], see `Written`; None where they are not recorded, or not one list per loss token."""
    lists, indices = sample.kept_ids, sample.loss_indices
    if lists is None or len(lists) != len(indices):
        return None
    out = np.full(len(sample), -1, np.int64)
    inside = indices >= 0
    out[indices[inside]] = lists.lengths[inside]
    return out


def _row(written: Written, row: Row, ends: dict[int, list[Placed]]) -> Markup:
    turn = "" if row.turn == NO_TURN else f"turn {row.turn}"
    about = ", ".join(filter(None, (ROLES[row.role], turn, "loss" if row.loss else "")))
    over = [s for s in written.scores if row.loss and _is_over(s, row)]
    of_medium = row.role in OF_MODALITY.values()
    body = (_placeholders if of_medium else _pieces)(written, row, ends)
    name, letter = ROLES[row.role], LETTERS[row.role]
    return Markup(_makes().row(row, name, letter, turn, about, "; ".join(map(str, over)), body))


def _is_over(score: Placed, row: Row) -> bool:
    """Whether the score is of a whole turn or sequence that holds the row, which is in the loss."""
    return score.level == "sequence" or (score.level == "turn" and score.turn == row.turn)


def _placeholders(written: Written, row: Row, ends: dict[int, list[Placed]]) -> list[Markup]:
    """One chip for the tokens of a medium."""
    name = f"media[{row.medium}]"
    if 0 <= row.medium < len(written.node.sample.media):
        name += f" {written.node.sample.media[row.medium].media_id}"
    count = row.stop - row.start
    data = {"n": count, "i": packed_ids([int(_ids(written)[row.start])])}
    chip = _makes().piece(["p", "f"], row.start, data, f"{name} × {count:,}")
    return [chip, *_chips(ends, row.start, row.stop)]


def _pieces(written: Written, row: Row, ends: dict[int, list[Placed]]) -> list[Markup]:
    """All of a row in the loss; of another its head, the rest to be opened."""
    if row.loss or row.stop - row.start <= HEAD + HEAD // 4:
        return _between(written, row, ends, row.start, row.stop)
    split = row.start + HEAD
    start, stop = row.start + ROW_HEAD, row.stop - ROW_TAIL
    if start < stop:  # too long to be drawn
        gap = [_makes().gap(stop - start), *_chips(ends, start, stop)]
    else:
        start, stop, gap = row.stop, row.stop, []
    rest = _between(written, row, ends, split, start)
    rest += [*gap, *_between(written, row, ends, stop, row.stop)]
    more = _makes().more(row.stop - split, rest)
    return [*_between(written, row, ends, row.start, split), more]


def _between(
    written: Written, row: Row, ends: dict[int, list[Placed]], start: int, stop: int
) -> list[Markup]:
    """The pieces of tokens [start, stop) of a row, each followed by the scores that end at it."""
    out: list[Markup] = []
    cuts = [start, *(c for c in row.cuts if start < c < stop), stop]
    for a, b in pairwise(cuts):
        out += [_piece(written, c, d, same) for c, d, same in repeats(_ids(written), a, b, FOLDED)]
        out += _chips(ends, a, b)
    return out


def _piece(written: Written, start: int, stop: int, same: bool) -> Markup:
    sample, texts = written.node.sample, written.texts
    ids = _ids(written)[start:stop].tolist()
    regions = {
        f"r{i}": r.label or ""
        for i, r in enumerate(sample.region_spans or ())
        if r.start <= start and stop <= r.stop
    }
    here = [
        s
        for s in written.scores
        if s.level in ("region", "span") and s.start <= start and stop <= s.stop
    ]
    about = [f"{name} {label}".strip() for name, label in regions.items()] + list(map(str, here))
    kinds = [score.kind for score in here if score.kind != "verdict"][:1]
    names = ["p", *(["g"] if regions else []), *kinds, *(["f"] if same else [])]
    shown = list(map(str, ids)) if texts is None else [visible(t) for t in texts[start:stop]]
    data: dict[str, Any] = {"m": escape(visible("; ".join(about)))}  # with its line ends
    if same:
        data |= {"i": packed_ids(ids[:1]), "n": stop - start}
        shown = [f"{shown[0]} × {stop - start:,}"]
    else:
        data |= {"i": packed_ids(ids), "l": "" if texts is None else packed_lengths(shown)}
        if written.logprobs is not None:
            cents = -100 * written.logprobs[start:stop].astype(np.float64)
            cents = np.nan_to_num(cents, nan=-1, posinf=-1, neginf=-1)
            data["p"] = _packed(cents.round().astype(np.int64), 2)
        if written.kept is not None:
            data["q"] = _packed(written.kept[start:stop], 3)
    between = " " if texts is None else ""
    return Markup(_makes().piece(names, start, data, escape(between.join(shown)), regions, between))


def packed_ids(ids: Sequence[int]) -> str:
    """How many digits an id has, then these digits of each; nothing for ids below 0, which only broken samples have."""
    if min(ids) < 0:
        return ""
    width = 1
    while len(DIGITS) ** width <= max(ids):
        width += 1
    return str(width) + "".join(_digits(i, width) for i in ids)


def packed_lengths(texts: Sequence[str]) -> str:
    """The length of each text in UTF-16, as scripts count."""
    out = []
    for text in texts:
        length = len(text) + sum(c > "\uffff" for c in text)
        out.append(DIGITS[-1] * (length // LONGEST) + DIGITS[length % LONGEST])
    return "".join(out)


def _packed(numbers: np.ndarray, width: int) -> str:
    """Whole numbers in so many digits each; one that they don't hold as the largest number, nothing if none fits."""
    most = len(DIGITS) ** width - 1
    known = (numbers >= 0) & (numbers < most)
    kept = np.where(known, numbers, most).tolist() if known.any() else []
    return "".join(_digits(n, width) for n in kept)


def _chips(ends: dict[int, list[Placed]], start: int, stop: int) -> list[Markup]:
    """The scores whose last token is in [start, stop)."""
    if not ends:
        return []
    found = [end for end in ends if start < end <= stop]
    return [_makes().chip(score) for end in sorted(found) for score in ends[end]]


def _ids(written: Written) -> np.ndarray:
    return written.node.sample.input_ids


@lru_cache(maxsize=1 << 16)
def _digits(number: int, width: int) -> str:
    out = ""
    for _ in range(width):
        number, digit = divmod(number, len(DIGITS))
        out = DIGITS[digit] + out
    return out
