"""Charts of the head: logprobs fused with its product, of logits, over ranks, over kept ids, and of teachers."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, digits, fraction, memory, milliseconds, of_best, one

PRODUCTS = 4  # of a step that computes logits again: forward, again, two gradients
_OTHER_WORK = {"liger, mean": "beside", "cuBLAS": "floor"}


def fused(report: dict[str, Any]) -> Chart:
    """linear_selected_logprobs beside cuBLAS."""
    groups = []
    for (n, h, rows), found in cases(report["rows"], "N", "H", "T").items():
        if len(found) < 8:
            continue
        title = f"{n:,} tokens, hidden {h:,}" + (f", of {rows:,} rows" if rows else "")
        groups.append(judged(Group(title, [_of_products(row) for row in found])))
    first = next(iter(cases(report["rows"], "N", "H", "T").values()))
    own = one(first, name="mmpack recompute")
    peer = of_best([r for r in first if _kind(r["name"]) == "peer"], "both_ms")
    share = PRODUCTS / own["both_x_cublas"]
    return Chart(
        "What does a step through the head cost, in cuBLAS's bare products of the same shape?",
        [
            Panel(
                "products; shorter is faster. Behind it: time, and memory",
                groups,
                mark=(PRODUCTS, "four products"),
            )
        ],
        "Forward and backward of logprobs, bf16, a vocabulary of 151,936. mmpack computes logits again in the "
        "backward, which takes four products, or stores what three need. Liger's mean gives no logprobs of tokens; "
        "cuBLAS in the same chunks has only the products.",
        (_headline("logprobs by the head", own, peer, share, "four products"),),
    )


def _of_products(row: Row) -> Bar:
    said = f"{digits(row['both_x_cublas'])} ·  {milliseconds(row['both_ms'])}, {memory(row['memory_bytes'])}"
    name = row["name"].replace("mmpack recompute, a fifth of the logits", "mmpack, a fifth kept")
    return Bar(name, row["both_x_cublas"], said, _kind(row["name"]))


def _kind(name: str) -> str:
    if name.startswith("mmpack"):
        return "own" if name == "mmpack recompute" else "own, another way"
    return next((kind for start, kind in _OTHER_WORK.items() if name.startswith(start)), "peer")


def _headline(what: str, own: Row, peer: Row, share: float | None, floor: str) -> Headline:
    return Headline(what, peer["both_ms"] / own["both_ms"], peer["name"], share, floor)


def ranks(report: dict[str, Any]) -> Chart:
    groups = []
    for (name,), rows in cases(report["rows"], "name").items():
        bars = [
            Bar(
                f"{row['ranks']} GPU" + "s" * (row["ranks"] > 1),
                row["speed_up"],
                f"{row['speed_up']:.2f} × · {milliseconds(row['both_ms'])}",
                "own" if name == "mmpack recompute" else "own, another way",
                row["ranks"],
            )
            for row in rows
        ]
        groups.append(Group(name, bars))
    most = of_best(report["rows"], "both_ms")
    share = most["speed_up"] / most["ranks"]
    what = f"head split over {most['ranks']} GPUs"
    return Chart(
        "How much faster is the head with its vocabulary split over GPUs?",
        [Panel("times as fast as one GPU; longer is better", groups, tick="as many as GPUs")],
        "Forward and backward of 13,107 tokens, bf16, over NCCL; each GPU holds its part of the vocabulary.",
        (Headline(what, share=share, floor=f"{most['ranks']} times"),),
    )


def of_logits(report: dict[str, Any]) -> Chart:
    """selected_logprobs beside one copy of the same bytes."""
    groups = []
    for (rows, dtype, compacted), found in cases(report["rows"], "T", "dtype", "compacted").items():
        which = "compacted" if compacted else "40 % of them scored"
        bars = [_of_copy(row) for row in found if "tokens_per_row" not in row and _asked(row)]
        groups.append(judged(Group(f"{rows:,} rows of {dtype}, {which}", bars), higher=True))
    found = [r for r in report["rows"] if (r.get("T"), r.get("dtype")) == (32_768, "bfloat16")]
    own = one([r for r in found if "tokens_per_row" not in r and _asked(r)], gradient="dense")
    peer = of_best([r for r in found if r["name"] != "mmpack"], "both_ms")
    share = own["both_share_of_copy"]
    return Chart(
        "How near does selected_logprobs come to one copy of the same bytes?",
        [
            Panel(
                "share of a copy's rate, forward and backward; longer is faster",
                groups,
                mark=(1, "a copy"),
            )
        ],
        "Logprobs and entropies of given logits, 151,936 a row, and their gradient: written dense, as peers do, for "
        "the scored rows alone, or in place of the logits. flash_attn gives no entropies.",
        (_headline("logprobs of logits", own, peer, share, "a copy"),),
    )


def _asked(row: Row) -> bool:
    return bool(row["entropy"]) or row["name"].startswith("flash_attn")


def _of_copy(row: Row) -> Bar:
    share, own = row["both_share_of_copy"], row["name"] == "mmpack"
    kind = "peer" if not own else "own" if row["gradient"] == "dense" else "own, another way"
    name = f"mmpack, {row['gradient']} gradient" if own else row["name"]
    said = f"{fraction(share)} · {milliseconds(row['both_ms'])}"
    return Bar(name, share, said, kind)


def kept_ids(report: dict[str, Any]) -> Chart:
    rows = [row for row in report["rows"] if "full_ms" in row]
    beside = [r for r in rows if r["section"] == "beside the full op"]
    groups = [
        Group(
            f"{row['N']:,} tokens, {row['ids']} ids",
            [
                Bar("logprobs over all ids", row["full_ms"], milliseconds(row["full_ms"])),
                Bar("over the kept ids", row["both_ms"], _faster(row), "own", row["floor_ms"]),
            ],
        )
        for row in beside
    ]
    lists = []
    for row in rows:
        if row["section"] != "beside the full op":
            ways = {"gather": "gathered rows", "products": "products"}
            bars = [
                Bar(name, row[f"{way}_ms"], _chosen(row, way), _way(row, way))
                for way, name in ways.items()
            ]
            lists.append(Group(f"{row['ids']} ids, {row['N']:,} tokens", bars))
    first = beside[0]
    return Chart(
        "What do logprobs over the ids that the sampler kept cost, beside all ids?",
        [
            Panel(
                "ms, forward and backward, log; a mean of 8 ids a token",
                groups,
                log=True,
                tick="floor: the gathered bytes at a copy's rate",
            ),
            Panel("ms, forward and backward; is the faster way chosen?", lists),
        ],
        "Lists as rollouts have them, then lists of one length by both ways: gathered rows of the head, or products "
        "with all of it. Where the way that is chosen is the slower, it is shown as missed.",
        (
            Headline(
                "logprobs over kept ids",
                first["x_faster"],
                "over all ids",
                first["of_floor"],
                "its bytes",
            ),
        ),
    )


def _faster(row: Row) -> str:
    return f"{milliseconds(row['both_ms'])}, {digits(row['x_faster'])} × as fast"


def _chosen(row: Row, way: str) -> str:
    return milliseconds(row[f"{way}_ms"]) + ", chosen" * (row["chosen"] == way)


def _way(row: Row, way: str) -> str:
    if row["chosen"] != way:
        return "own, another way"
    return "missed" if row[f"{way}_ms"] > min(row["gather_ms"], row["products_ms"]) else "own"


def teachers(report: dict[str, Any]) -> Chart:
    groups = []
    for row in report["rows"]:
        who = {
            "fused, by lists": ("both_ms", "memory_bytes", "own"),
            "all logits, log_softmax": ("logits_ms", "logits_memory", "peer"),
            "all logits, in chunks": ("chunked_ms", "chunked_memory", "peer"),
            "without teachers": ("sampled_ms", "sampled_memory", "floor"),
        }
        bars = [
            Bar(name, row[ms], f"{milliseconds(row[ms])}, {memory(row[size])}", kind)
            for name, (ms, size, kind) in who.items()
        ]
        count = f"{row['teachers']} teacher" + "s" * (row["teachers"] > 1)
        groups.append(
            judged(
                Group(f"{count}, {row['K']} " + ("ids each" if row["K"] > 1 else "id each"), bars)
            )
        )
    row = one(report["rows"], K=64, teachers=1)
    peers = {"all logits": row["logits_ms"], "all logits, in chunks": row["chunked_ms"]}
    peer = min(peers, key=lambda name: peers[name])
    return Chart(
        "What does a step of distillation from a teacher's top ids cost, beside full logits?",
        [Panel("ms; shorter is faster. Behind it: memory beyond gradients", groups)],
        "The head and the divergence of 13,107 tokens. Without teachers: only the sampled id's logprob.",
        (
            Headline(
                "distillation, 64 ids",
                peers[peer] / row["both_ms"],
                peer,
                row["sampled_ms"] / row["both_ms"],
                "a step without teachers",
            ),
        ),
    )
