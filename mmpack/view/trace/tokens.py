"""The tokens of a sample as rows of HTML: what they are, their text, and the scores that end at them.

A piece is one element. How long its tokens are, their ids and their logprobs are packed into its attributes, so that a
token costs some four bytes beside its text; the page's script makes elements of tokens when a row is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mmpack.errors import one_line
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
NO_COUNT = len(DIGITS) ** 3 - 1
NO_LOGPROB = len(DIGITS) ** 2 - 1  # in hundredths, as two digits


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
    drawn = _joined([_row(written, row, ends) for row in found])
    return Markup('<div class="rows">') + drawn + Markup("</div>")


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
    makes = template("trace.html")
    return Markup(makes.row(row, name, letter, turn, about, "; ".join(map(str, over)), body))


def _is_over(score: Placed, row: Row) -> bool:
    """Whether the score is of a whole turn or sequence that holds the row, which is in the loss."""
    return score.level == "sequence" or (score.level == "turn" and score.turn == row.turn)


def _placeholders(written: Written, row: Row, ends: dict[int, list[Placed]]) -> Markup:
    """One chip for the tokens of a medium."""
    name = f"media[{row.medium}]"
    known = 0 <= row.medium < len(written.node.sample.media)
    if known:
        name += f" {written.node.sample.media[row.medium].media_id}"
    count = row.stop - row.start
    packed = packed_ids([int(written.node.sample.input_ids[row.start])])
    about = f'class="p f" data-s="{row.start}" data-n="{count}" data-i="{packed}"'
    chip = Markup(f"<span {about}>{escape(one_line(f'{name} × {count:,}'))}</span>")
    return _joined([chip, *_chips(ends, row.start, row.stop)])


def _pieces(written: Written, row: Row, ends: dict[int, list[Placed]]) -> Markup:
    """All of a row in the loss; of another its head, the rest to be opened."""
    if row.loss or row.stop - row.start <= HEAD + HEAD // 4:
        return _joined(_between(written, row, ends, row.start, row.stop))
    split = row.start + HEAD
    head = _joined(_between(written, row, ends, row.start, split))
    rest: list[Markup]
    if row.stop - row.start > ROW_HEAD + ROW_TAIL:
        gap = (row.start + ROW_HEAD, row.stop - ROW_TAIL)
        rest = _between(written, row, ends, split, gap[0])
        words = f" {gap[1] - gap[0]:,} tokens are not drawn "
        rest.append(Markup(f'<span class="gap">{words}</span>'))
        rest += _chips(ends, gap[0], gap[1])
        rest += _between(written, row, ends, gap[1], row.stop)
    else:
        rest = _between(written, row, ends, split, row.stop)
    more = Markup(f'<details class="more"><summary>{row.stop - split:,} more tokens</summary>')
    return _joined([head, more, *rest, Markup("</details>")])


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
    regions = [
        i for i, r in enumerate(sample.region_spans or ()) if r.start <= start and stop <= r.stop
    ]
    here = [
        s
        for s in written.scores
        if s.level in ("region", "span") and s.start <= start and stop <= s.stop
    ]
    about = [f"r{i} {(sample.region_spans or [])[i].label or ''}".strip() for i in regions]
    about += [str(score) for score in here]
    kinds = [score.kind for score in here if score.kind != "verdict"][:1]
    names = ["p", *(["g"] if regions else []), *kinds, *(["f"] if same else [])]
    given = f' data-m="{escape(visible("; ".join(about)))}"' if about else ""
    shown = list(map(str, ids)) if texts is None else [visible(t) for t in texts[start:stop]]
    given += f' data-i="{packed_ids(ids[:1] if same else ids)}"'
    if same:
        given += f" data-n={stop - start}"
        shown = [f"{shown[0]} × {stop - start:,}"]
    elif texts is not None:
        given += f' data-l="{packed_lengths(shown)}"'
    if written.logprobs is not None and not same:
        given += _logprobs(written.logprobs[start:stop])
    if written.kept is not None and not same:
        given += _kept(written.kept[start:stop])
    body = escape(("" if texts is not None else " ").join(shown))
    opened = Markup(f'<span class="{" ".join(names)}" data-s={start}{given}>')
    mark = f"<sup>{' '.join(f'r{i}' for i in regions)}</sup>" if regions else ""
    space = "" if texts is not None else " "
    return opened + body + Markup(f"</span>{mark}{space}")


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


def _logprobs(values: np.ndarray) -> str:
    """An attribute: hundredths below 0 in two digits; those that two digits don't hold are left out."""
    cents = [round(-100 * float(v)) if np.isfinite(v) else NO_LOGPROB for v in values]
    if all(c == NO_LOGPROB for c in cents):
        return ""
    digits = [_digits(c if 0 <= c < NO_LOGPROB else NO_LOGPROB, 2) for c in cents]
    return f' data-p="{"".join(digits)}"'


def _kept(counts: np.ndarray) -> str:
    """An attribute: how many ids were kept, in three digits."""
    if (counts < 0).all():
        return ""
    digits = [_digits(c if 0 <= c < NO_COUNT else NO_COUNT, 3) for c in counts.tolist()]
    return f' data-q="{"".join(digits)}"'


def _chips(ends: dict[int, list[Placed]], start: int, stop: int) -> list[Markup]:
    """The scores whose last token is in [start, stop)."""
    if not ends:
        return []
    found = [end for end in ends if start < end <= stop]
    chip = template("trace.html").chip
    return [chip(score) for end in sorted(found) for score in ends[end]]


def _joined(parts: Sequence[Markup]) -> Markup:
    return Markup("").join(parts)


def _ids(written: Written) -> np.ndarray:
    return written.node.sample.input_ids


@lru_cache(maxsize=1 << 16)
def _digits(number: int, width: int) -> str:
    out = ""
    for _ in range(width):
        number, digit = divmod(number, len(DIGITS))
        out = DIGITS[digit] + out
    return out
