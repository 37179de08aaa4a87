"""The page of a plan: a lane for each rank, its micro-batches as boxes as wide as their cost, and what is in them."""

from __future__ import annotations

from typing import Any

from mmpack.planning.planned import Plan
from mmpack.view.document import document
from mmpack.view.parity.style import STYLE
from mmpack.view.tags import Markup, joined, table, tag

WIDTH, LANE, LABEL = 1000.0, 74.0, 78.0
END = 96.0  # to the right of the lanes: their cost
LANES, ROWS = 64, 200  # drawn at most: ranks, lines of the table
READABLE = 58.0  # a box's least width for its words
KINDS = {"rows": "mm-image", "patches": "mm-observation", "loss tokens": "mm-loss"}
OWN = """
.mmpack .mm-lanes{min-width:720px;width:100%;display:block;font:12px system-ui,sans-serif}
.mmpack .mm-lanes text{fill:var(--fg)}.mmpack .mm-lanes text.mm-soft{fill:var(--soft)}
.mmpack rect.mm-box{fill:var(--card);stroke:var(--soft);stroke-width:1}
.mmpack rect.mm-room{fill:var(--line)}.mmpack line.mm-mean{stroke:var(--bad);stroke-dasharray:4 3}
.mmpack .mm-lanes text.mm-mean{fill:var(--bad)}.mmpack .mm-lanes text.mm-count{font-size:10px}
"""


def page(plan: Plan, title: str = "plan") -> str:
    """A plan as one self-contained page that runs no script and loads nothing.

    Raises: MissingExtraError without MarkupSafe.
    """
    return document(title, STYLE + OWN, _body(plan, title))


def drawn(plan: Plan) -> Markup:
    """Its counts, its ranks and how full its budgets are."""
    fills = [(name, f"{fill:.1%}") for name, fill in plan.stats.get("fills", {}).items()]
    lanes = tag("div", _lanes(plan), class_="wide")
    return joined([tag("p", _counts(plan)), _key(), lanes, table(("budget", "filled"), fills)])


def _counts(plan: Plan) -> str:
    counts = f"{plan.total_samples:,} samples, {plan.total_tokens:,} loss tokens "
    return counts + f"in {len(plan.bins)} micro-batches on {len(plan.ranks)} ranks"


def _body(plan: Plan, title: str) -> Markup:
    stats = plan.stats
    single = [(n, _said(v)) for n, v in stats.items() if not isinstance(v, list | dict)]
    fills = [(name, f"{fill:.1%}") for name, fill in stats.get("fills", {}).items()]
    more = len(plan.ranks) - LANES
    lanes = [tag("p", f"{LANES} ranks are drawn, {more} more are not.")] if more > 0 else []
    return joined(
        [
            tag("h1", title),
            tag("p", _counts(plan)),
            tag("h2", "Ranks"),
            tag(
                "p",
                "A box is a micro-batch, as wide as its cost; its bars are scaled by the largest micro-batch "
                "of each kind. A dashed line marks the ranks' mean cost.",
                class_="mm-note",
            ),
            _key(),
            tag("div", _lanes(plan), class_="wide"),
            *lanes,
            tag("h2", "Budgets"),
            table(("budget", "filled"), fills),
            tag("h2", "Figures"),
            table(("what", "value"), single),
            tag("h2", "Micro-batches"),
            _bins(plan),
        ]
    )


def _key() -> Markup:
    entries = [
        tag("span", tag("svg", tag("rect", width=10, height=10, class_=style), view_box="0 0 10 10"), kind)
        for kind, style in KINDS.items()
    ]  # fmt: skip
    return tag("div", *entries, class_="mm-key")


def _lanes(plan: Plan) -> Markup:
    shown = plan.ranks[:LANES]
    loads = [sum(plan.bin_costs[b] for b in rank) for rank in plan.ranks]
    scale = (WIDTH - LABEL - END) / (max(loads, default=0.0) or 1.0)
    height = LANE * len(shown) + 22
    parts = [part for at, rank in enumerate(shown) for part in _lane(plan, at, rank, loads, scale)]
    if loads and sum(loads):
        x = f"{LABEL + scale * sum(loads) / len(loads):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=height - 18, class_="mm-mean"))
        parts.append(tag("text", "mean", x=x, y=height - 4, text_anchor="middle", class_="mm-mean"))
    return tag(
        "svg",
        *parts,
        view_box=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=f"{len(shown)} ranks with their micro-batches",
        class_="mm-lanes",
    )


def _lane(plan: Plan, at: int, rank: list[int], loads: list[float], scale: float) -> list[Markup]:
    top, x = at * LANE, LABEL
    parts = [tag("text", f"rank {at}", x=0, y=top + LANE / 2, class_="mm-soft")]
    for b in rank:
        width = scale * plan.bin_costs[b]
        if width:
            parts.append(_box(plan, b, x, top + 4, width))
        x += width
    unit = "" if plan.stats.get("seconds") is None else " s"
    said = f"{_said(loads[at])}{unit}" if loads[at] else "idle"
    parts.append(tag("text", said, x=WIDTH - END + 10, y=top + LANE / 2, class_="mm-soft"))
    return parts


def _box(plan: Plan, b: int, x: float, y: float, width: float) -> Markup:
    held = dict(
        zip(KINDS, (plan.bin_rows[b], plan.bin_patches[b], plan.bin_loss_tokens[b]), strict=True)
    )
    most = (max(plan.bin_rows), max(plan.bin_patches), max(plan.bin_loss_tokens))
    samples, high, gap = len(plan.bins[b]), LANE - 8, min(5.0, width / 8)
    inner = max(width - 2 * gap, 0.5)
    about = ", ".join(f"{count:,} {kind}" for kind, count in held.items())
    parts = [
        tag("title", f"micro-batch {b}: {samples} samples, {about}, cost {plan.bin_costs[b]:.6g}"),
        tag(
            "rect",
            x=f"{x:.1f}",
            y=f"{y:.1f}",
            width=f"{max(width - 1, 0.5):.1f}",
            height=high,
            rx=3,
            class_="mm-box",
        ),
    ]
    words = width >= READABLE
    if words:
        shared = " · shared" if plan.share[b] and width >= 2 * READABLE else ""
        head = f"{b} · {samples} samples{shared}" if width >= 1.5 * READABLE else f"{b} · {samples}"
        parts.append(tag("text", head, x=f"{x + gap:.1f}", y=f"{y + 14:.1f}"))
    for k, ((kind, count), largest) in enumerate(zip(held.items(), most, strict=True)):
        place = {"x": f"{x + gap:.1f}", "y": f"{y + 22 + 14 * k:.1f}", "height": 11, "rx": 2}
        parts.append(tag("rect", **place, width=f"{inner:.1f}", class_="mm-room"))
        share = count / largest if largest else 0.0
        parts.append(tag("rect", **place, width=f"{inner * share:.1f}", class_=KINDS[kind]))
        if words:
            parts.append(
                tag(
                    "text",
                    f"{count:,}",
                    x=f"{x + gap + 3:.1f}",
                    y=f"{y + 31 + 14 * k:.1f}",
                    class_="mm-count",
                )
            )
    return tag("g", *parts)


def _bins(plan: Plan) -> Markup:
    rank_of = {b: rank for rank, bins in enumerate(plan.ranks) for b in bins}
    head = ("micro-batch", "rank", "samples", "shared", *KINDS, "cost")
    rows: list[Any] = [
        (b, rank_of[b], len(members), "yes" if plan.share[b] else "no")
        + tuple(f"{n:,}" for n in (plan.bin_rows[b], plan.bin_patches[b], plan.bin_loss_tokens[b]))
        + (f"{plan.bin_costs[b]:.4g}",)
        for b, members in enumerate(plan.bins[:ROWS])
    ]
    more = len(plan.bins) - ROWS
    note = [tag("p", f"and {more} more", class_="mm-note")] if more > 0 else []
    return joined([table(head, rows), *note])


def _said(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
