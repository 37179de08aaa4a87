"""Two sides of a sample as strips: the whole, one rectangle per span of tokens; and the tokens around a difference.

Both sides use one scale, so they are aligned up to the first difference, which a line marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmpack.parity.causes.pair import Pair, Side
from mmpack.view.parity.layout import KINDS, decoded, kinds, pieces
from mmpack.view.tags import Markup, joined, tag

WIDTH, HEIGHT, GAP = 1000, 22, 6  # of the drawing, in its own units
BEFORE, AFTER = 4, 14  # tokens shown around the first difference
CONTEXT = 24  # tokens of text before and after it
PIECES = 400  # spans drawn of one side; beyond it they are thinner than a pixel

Decode = Callable[[Sequence[int]], str]


def overview(pair: Pair, at: int | None) -> Markup:
    """Both sides from the first token to the last."""
    longest = max(len(side) for side in pair.sides) or 1
    scale = WIDTH / longest
    parts = []
    for row, side in enumerate(pair.sides):
        y = row * (HEIGHT + GAP)
        found = pieces(kinds(side))
        for start, stop, kind in found[:PIECES]:
            title = f"{side.name}: {KINDS[kind]} [{start}, {stop}), {stop - start} tokens"
            parts.append(
                tag(
                    "rect",
                    tag("title", title),
                    class_=f"mm-{KINDS[kind]}",
                    x=f"{start * scale:.2f}",
                    y=y,
                    width=f"{max((stop - start) * scale, 0.6):.2f}",
                    height=HEIGHT,
                )
            )
        if len(found) > PIECES:
            x = found[PIECES][0] * scale
            shape = {"x": f"{x:.2f}", "y": y, "width": f"{len(side) * scale - x:.2f}"}
            title = tag("title", f"{len(found) - PIECES} more spans")
            parts.append(tag("rect", title, class_="mm-text", height=HEIGHT, **shape))
    height = 2 * HEIGHT + GAP
    if at is not None:
        place = f"{min(at * scale, WIDTH - 1):.2f}"
        parts.append(tag("line", x1=place, x2=place, y1=-4, y2=height + 4, class_="mm-mark"))
    drawing = tag(
        "svg",
        *parts,
        view_box=f"0 -4 {WIDTH} {height + 8}",
        preserveAspectRatio="none",
        class_="mm-strip",
        role="img",
        aria_label="spans of rollout (above) and train (below)",
    )
    names = [tag("span", f"{side.name} {len(side)}") for side in pair.sides]
    return tag("div", tag("div", *names, class_="mm-names"), drawing, class_="mm-overview")


def zoom(pair: Pair, at: int, what: str, decode: Decode | None) -> Markup:
    """One cell per token around the first difference, both sides aligned at it."""
    start = max(at - BEFORE, 0)
    indices = range(start, at + AFTER)
    unlike = _unlike(pair, start, at + AFTER, what)
    head = [tag("th"), *(tag("th", i, class_="mm-at" if i == at else None) for i in indices)]
    rows = [tag("tr", *head)]
    for side in pair.sides:
        of = kinds(side)
        cells = [tag("th", side.name)]
        cells += [_cell(side, of, i, unlike[i - start], what, decode) for i in indices]
        rows.append(tag("tr", *cells))
    options = {"class_": "wide", "tabindex": "0", "role": "group"}
    return tag(
        "div", tag("table", *rows, class_="mm-zoom"), aria_label=f"tokens around {at}", **options
    )


def around(pair: Pair, at: int, decode: Decode | None) -> Markup:
    """The text (ids without a decoder) around the first difference, which stands between two marks."""
    lines = []
    for side in pair.sides:
        before = decoded(side, max(at - CONTEXT, 0), min(at, len(side)), decode)
        after = decoded(side, min(at, len(side)), min(at + CONTEXT, len(side)), decode)
        more = "…" if at + CONTEXT < len(side) else ""
        text = tag("code", "…" if at > CONTEXT else "", before, tag("mark", "│"), after, more)
        lines.append(tag("div", tag("b", side.name), text, class_="mm-around"))
    return joined(lines)


def _cell(
    side: Side, of: np.ndarray, i: int, unlike: bool, what: str, decode: Decode | None
) -> Markup:
    if i >= len(side):
        return tag("td", "–", class_="mm-none mm-unlike" if unlike else "mm-none")
    kind = KINDS[of[i]]
    one = int(side.ids[i])
    shown = decode([one]) if decode else str(one)
    if side.placeholder[i]:
        shown = kind
    inner = [shown if len(shown) <= 14 else f"{shown[:13]}…"]
    if what == "positions" and side.sample.position_ids is not None:
        inner.append(tag("small", ", ".join(map(str, side.sample.position_ids[:, i].tolist()))))
    title = f"token {i}: id {one}, {kind}"
    return tag("td", *inner, class_=f"mm-{kind}{' mm-unlike' if unlike else ''}", title=title)


def _unlike(pair: Pair, start: int, stop: int, what: str) -> np.ndarray:
    """bool [stop - start]: token differs in id or kind, or one side lacks it; in `what` positions, by these too."""
    out = np.zeros(stop - start, dtype=bool)
    left, right = pair.sides
    shorter, longer = sorted((len(left), len(right)))
    out[max(shorter - start, 0) : max(longer - start, 0)] = True
    both = slice(start, min(stop, shorter))
    unlike = (left.ids[both] != right.ids[both]) | (kinds(left)[both] != kinds(right)[both])
    a, b = left.sample.position_ids, right.sample.position_ids
    if what == "positions" and a is not None and b is not None:
        unlike |= (a[:, both] != b[:, both]).any(axis=0)
    out[: len(unlike)] |= unlike
    return out
