"""The page of a plan: a lane for each rank, its micro-batches as boxes as wide as their cost, and what is in them."""

from __future__ import annotations

from typing import Any

from mmpack.planning.planned import Plan
from mmpack.view import parts as draw
from mmpack.view.bars import histogram, said, saved_parts

WIDTH, LANE, LABEL = 1000.0, 74.0, 78.0
END = 96.0  # to the right of the lanes: their cost
ROOM = WIDTH - LABEL - END
LANES, ROWS = 64, 200  # drawn at most: ranks, lines of the table
READABLE = 58.0  # a box's least width for its words
LETTER = 6.7  # of a word, on average
KINDS = {"rows": "mm-image", "patches": "mm-observation", "loss tokens": "mm-loss"}
REPEATED = {f"{what}_{how}" for what in ("rows", "patches") for how in ("padded", "repeated")}
REPEATED |= {"rows_packed", "patches", "repeat_cost"}
KEY = draw.Key([(style, kind) for kind, style in KINDS.items()])


def plan_parts(plan: Plan, title: str = "plan") -> list[draw.Part]:
    """What a page and a figure show of a plan."""
    more = len(plan.ranks) - LANES
    boxes = (
        "Each box is a micro-batch, as wide as its cost; its bars are scaled to the largest micro-batch of each kind. "
        "The dashed line marks the mean cost of the ranks."
    )
    lines = (
        [draw.Line(f"The first {LANES} ranks are drawn; {more} more are not.")] if more > 0 else []
    )
    single = [(n, _said(v)) for n, v in plan.stats.items() if not isinstance(v, list | dict)]
    return [
        draw.Heading(title, 1),
        draw.Line(_counts(plan)),
        draw.Heading("Ranks"),
        draw.Line(boxes, soft=True),
        KEY,
        _lanes(plan),
        *lines,
        draw.Heading("Fill and balance"),
        *_fill(plan),
        *_repeated(plan),
        draw.Heading("Micro-batches"),
        draw.Grid(_histograms(plan)),
        _bins(plan),
        draw.folded_table("all figures", ("figure of Plan.stats", "value"), single),
        *_dropped(plan),
    ]


def short_parts(plan: Plan) -> list[draw.Part]:
    """What a notebook shows: its counts, its ranks and how full its budgets are."""
    return [draw.Line(_counts(plan)), KEY, _lanes(plan), *_fill(plan)]


def _dropped(plan: Plan) -> list[draw.Part]:
    rows = [(d.sample_id, d.reason) for d in plan.dropped[:ROWS]]
    name = f"{len(plan.dropped):,} samples left out"
    return [draw.Heading(name), draw.Table(("sample", "why"), rows)] if rows else []


def _first(one: str, many: str, count: int) -> str:
    return f"{count:,} {one if count == 1 else many}" + (
        f", the first {ROWS}" if count > ROWS else ""
    )


def _counts(plan: Plan) -> str:
    counts = f"{plan.total_samples:,} samples, {plan.total_tokens:,} loss tokens "
    return counts + f"in {len(plan.bins)} micro-batches on {len(plan.ranks)} ranks"


def _fill(plan: Plan) -> list[draw.Part]:
    """How full the budgets are, and how even the ranks; 1 is even."""
    stats = plan.stats
    rows = [(f"{name} used", f"{fill:.1%}") for name, fill in stats.get("fills", {}).items()]
    evenness = (
        ("cost: costliest rank over the mean", "balance"),
        ("cost: the same if ranks wait after every micro-batch", "lockstep"),
        ("patches: largest rank over the mean", "media_balance"),
    )
    rows += [(name, f"{stats[key]:.3f}") for name, key in evenness if key in stats]
    if stats.get("seconds") is not None:
        error = stats.get("seconds_error")
        about = "" if error is None else f" ± {error:.0%}"
        rows.append(("predicted seconds of the slowest rank", f"{_said(stats['seconds'])}{about}"))
    return [draw.Table(("what", "value"), rows)] if rows else []


def _repeated(plan: Plan) -> list[draw.Part]:
    stats = plan.stats
    if not stats.keys() >= REPEATED:
        return []
    packed, shared = stats["rows_packed"], stats.get("rows_shared")
    saved = [
        ("rows", packed, packed if shared is None else shared),
        ("patches", stats["patches_padded"], stats["patches"]),
    ]
    said_ = f"Padded to rectangles, they would take {stats['rows_padded']:,} rows. "
    if stats["rows_repeated"] or stats["patches_repeated"]:
        said_ += (
            f"{stats['rows_repeated']:,} rows and {stats['patches_repeated']:,} patches are computed twice or more "
            f"because groups are split between micro-batches: {stats['repeat_cost']:.1%} of the cost."
        )
    else:
        said_ += "No group is split between micro-batches."
    return [*saved_parts(saved, "in these micro-batches"), draw.Line(said_)]


def _histograms(plan: Plan) -> list[Any]:
    filled = [b for b, members in enumerate(plan.bins) if members]
    samples = [len(members) for members in plan.bins]
    kinds: dict[str, Any] = {"samples": samples, **_held(plan), "cost": plan.bin_costs}
    return [
        histogram([values[b] for b in filled], f"{kind} of a micro-batch")
        for kind, values in kinds.items()
        if values
    ]


def _held(plan: Plan) -> dict[str, list[int]]:
    """What each micro-batch holds, by KINDS."""
    return dict(zip(KINDS, (plan.bin_rows, plan.bin_patches, plan.bin_loss_tokens), strict=True))


def _lanes(plan: Plan) -> draw.Drawing:
    shown = plan.ranks[:LANES]
    loads = [sum(plan.bin_costs[b] for b in rank) for rank in plan.ranks]
    most = max(loads, default=0.0) or 1.0
    height = LANE * len(shown) + 22
    shapes = [s for at, rank in enumerate(shown) for s in _lane(plan, at, rank, loads, most)]
    if loads and sum(loads):
        x = LABEL + ROOM * (sum(loads) / len(loads) / most)
        shapes.append(draw.Stroke(x, 0, x, height - 18, "mm-mean"))
        shapes.append(draw.Word(x, height - 4, "mean", "mm-mean", "middle"))
    label = f"{len(shown)} ranks with their micro-batches: {_counts(plan)}"
    return draw.Drawing(shapes, height, label)


def _lane(
    plan: Plan, at: int, rank: list[int], loads: list[float], most: float
) -> list[draw.Shape]:
    top, x = at * LANE, LABEL
    shapes: list[draw.Shape] = [draw.Word(0, top + LANE / 2, f"rank {at}", "mm-soft")]
    for b in rank:
        width = ROOM * (plan.bin_costs[b] / most)
        if width:
            shapes += _box(plan, b, x, top + 4, width)
        x += width
    unit = "" if plan.stats.get("seconds") is None else " s"
    load = f"{_said(loads[at])}{unit}" if loads[at] else "idle"
    shapes.append(draw.Word(WIDTH - END + 10, top + LANE / 2, load, "mm-soft"))
    return shapes


def _box(plan: Plan, b: int, x: float, y: float, width: float) -> list[draw.Shape]:
    held = {kind: (counts[b], max(counts)) for kind, counts in _held(plan).items()}
    samples, gap = len(plan.bins[b]), min(5.0, width / 8)
    inner = max(width - 2 * gap, 0.5)
    about = ", ".join(f"{count:,} {kind}" for kind, (count, _) in held.items())
    about = f"micro-batch {b}: {samples} samples, {about}, cost {plan.bin_costs[b]:.6g}"
    frame = draw.Box(x, y, max(width - 1, 0.5), LANE - 8, "mm-box", about, 3)
    shapes: list[draw.Shape] = [frame]
    words = width >= READABLE
    if words:
        heads = [f"{b} · {samples}{more}" for more in (" samples · shared", " samples", "")]
        fits = [h for h in heads[not plan.share[b] :] if LETTER * len(h) <= inner]
        shapes += [draw.Word(x + gap, y + 14, head) for head in fits[:1]]
    for k, (kind, (count, largest)) in enumerate(held.items()):
        line = y + 22 + 14 * k
        share = count / largest if largest else 0.0
        shapes.append(draw.Box(x + gap, line, inner, 11, "mm-room", about, 2))
        shapes.append(
            draw.Box(x + gap, line, inner * share, 11, f"{KINDS[kind]} mm-under", about, 2)
        )
        if words:
            shapes.append(draw.Word(x + gap + 3, line + 9, f"{count:,}", size=10))
    return shapes


def _bins(plan: Plan) -> draw.Part:
    """All micro-batches; the last but one: rows over what one may hold."""
    rank_of = {b: rank for rank, bins in enumerate(plan.ranks) for b in bins}
    rows_of_all, fill = sum(plan.bin_rows), plan.stats.get("fill")
    share = sum(map(bool, plan.bins)) * fill / rows_of_all if fill and rows_of_all else 0.0
    head = ("micro-batch", "rank", "samples", "shared", *KINDS, "max_tokens used", "cost")
    rows = [
        (b, rank_of[b], len(members), "yes" if plan.share[b] else "no")
        + tuple(f"{counts[b]:,}" for counts in _held(plan).values())
        + (f"{plan.bin_rows[b] * share:.1%}" if share else "–", f"{plan.bin_costs[b]:.4g}")
        for b, members in enumerate(plan.bins[:ROWS])
    ]
    return draw.folded_table(_first("micro-batch", "micro-batches", len(plan.bins)), head, rows)


def _said(value: Any) -> str:
    return "–" if value is None else said(value) if isinstance(value, int | float) else str(value)
