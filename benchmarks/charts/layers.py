"""Charts of layers: attention, linear attention, the projector with the merge, the batch-invariant mode."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, digits, fraction, milliseconds, of_best, one, shares

_BACKENDS = {"flash_attn_4": "FlashAttention-4", "flex_flash": "FlexAttention by FA4"}
_TORCH = ("varlen", "flex")


def attention(report: dict[str, Any]) -> Chart:
    groups = [_attention(*key, rows) for key, rows in cases(report["rows"], "shape").items()]
    rows = next(iter(cases(report["rows"], "shape").values()))
    padded, shared = one(rows, layout="padded"), one(rows, layout="shared", chosen=True)
    faster = padded["forward_backward_ms"] / shared["forward_backward_ms"]
    return Chart(
        "How long does one layer's attention take, in each layout?",
        [Panel("ms, forward and backward; shorter is faster", groups)],
        "Prompts × (tokens of a prompt + of its responses); 28 heads over 4 of 128, bf16. Packs hold no padding, "
        "shared ones each prompt once. What mmpack chooses by its cost model is shown as missed where another backend "
        "was faster.",
        (Headline("attention of one layer", faster, "padded, torch's SDPA"),),
    )


def _attention(shape: str, rows: list[Row]) -> Group:
    time = "forward_backward_ms"
    padded = one(rows, layout="padded")
    bars = [Bar("padded, torch's SDPA", padded[time], milliseconds(padded[time]))]
    for layout, name in {"plain": "packed", "shared": "shared"}.items():
        own = [row for row in rows if row["layout"] == layout]
        torch = of_best([row for row in own if row["backend"] in _TORCH], time)
        chosen = one(own, chosen=True)
        said = f"{milliseconds(torch[time])}, {torch['backend']}"
        bars.append(Bar(f"{name}, torch's best", torch[time], said, "own, another way"))
        said = (
            f"{milliseconds(chosen[time])}, {_BACKENDS.get(chosen['backend'], chosen['backend'])}"
        )
        kind = "own"
        if chosen["over_best"] > 1:
            kind, said = "missed", f"{said}, {chosen['over_best']:.2f} × the best"
        bars.append(Bar(f"{name}, chosen", chosen[time], said, kind))
    return Group(_tokens(shape), bars)


def _tokens(shape: str) -> str:
    """`1,200 · 8 × 1,024 · 4`, the reports' way to write tokens of a prompt, of its responses, and how many prompts."""
    prompt, responses, count = shape.split(" · ")
    return f"{count} × ({prompt} + {responses})"


def linear_attention(report: dict[str, Any]) -> Chart:
    groups = []
    for (op, what, shape), rows in cases(report["rows"], "op", "what", "shape").items():
        bars = [
            Bar(
                f"{row['layout']}, {row['who'].removesuffix(' across samples')}",
                row["of_floor"],
                f"{fraction(row['of_floor'])} · {milliseconds(row['ms'])}",
                "own" if row["who"].startswith("mmpack") else "peer",
            )
            for row in rows
        ]
        groups.append(judged(Group(f"{op}, {what}: {_tokens(shape)}", bars), higher=True))
    key = {"op": "segment_conv1d", "what": "forward and backward", "layout": "plain"}
    rows = [row for row in report["rows"] if all(row[k] == v for k, v in key.items())]
    rows = [row for row in rows if row["shape"] == rows[-1]["shape"]]
    own = one(rows, who="mmpack")
    peer = of_best([row for row in rows if row is not own], "ms")
    return Chart(
        "How near does linear attention come to its floor, and how do others?",
        [Panel("share of the floor; longer is faster", groups, mark=(1, "the floor"))],
        "The floor: of the convolution its bytes read and written once, of the delta rule its products at the card's "
        "peak. Plain packs repeat each prompt, shared ones hold it once.",
        (
            Headline(
                "convolution of linear attention",
                peer["ms"] / own["ms"],
                peer["who"].removesuffix(" across samples"),
                own["of_floor"],
                "its bytes",
            ),
        ),
    )


def projection(report: dict[str, Any]) -> Chart:
    kinds = {
        "mmpack": "own",
        "torch linear, merge_embeddings": "own, another way",
        "cuBLAS in chunks, scatter_rows": "own, another way",
    }
    groups = [
        judged(shares(f"{case}, {what}", rows, "of_floor", kinds, "ms"), higher=True)
        for (case, what), rows in cases(report["rows"], "case", "what").items()
    ]
    rows = [r for r in report["rows"] if r["what"] == "forward and backward"]
    rows = cases(rows, "case")[(rows[0]["case"],)]
    own, peer = one(rows, who="mmpack"), of_best([r for r in rows if r["who"] not in kinds], "ms")
    return Chart(
        "How near does project_and_merge come to cuBLAS's bare product?",
        [
            Panel(
                "share of the floor; longer is faster", groups, mark=(1, "products and text's copy")
            )
        ],
        "The projector's last layer and the merge of its rows into those of text. Of two ops, `merge_embeddings` and "
        "`scatter_rows` are mmpack's too.",
        (
            Headline(
                "projector and merge",
                peer["ms"] / own["ms"],
                peer["who"],
                own["of_floor"],
                "its products",
            ),
        ),
    )


def invariant(report: dict[str, Any]) -> Chart:
    steps = [row for row in report["rows"] if row["section"] == "step times"]
    times = []
    for row in steps:
        plain, mode = row["plain ms"], row["mode ms"]
        bars = [
            Bar("plain", plain, milliseconds(plain)),
            Bar("batch-invariant", mode, f"{milliseconds(mode)}, {mode / plain:.2f} ×", "own"),
        ]
        times.append(judged(Group(f"{row['timed']}, {row['tokens']:,} tokens", bars)))
    products = []
    rows = [row for row in report["rows"] if row["section"] == "products"]
    for (count,), found in cases([r for r in rows if r["product"] == "X · Wᵀ"], "M").items():
        bars = []
        for row in found:
            kind = "own" if row["x_cublas"] <= 1.05 else "missed"
            label = f"{row['K']:,} to {row['N']:,}"
            bars.append(Bar(label, row["x_cublas"], digits(row["x_cublas"]), kind))
        products.append(Group(f"{count:,} rows" if count > 1 else "1 row", bars))
    first = steps[0]
    return Chart(
        "What do the same bits in any batch cost?",
        [
            Panel("ms of a step of some layers, forward and backward", times),
            Panel("time over cuBLAS's, forward; shorter is better", products, mark=(1, "cuBLAS")),
        ],
        "Layers of Qwen2.5-VL-7B. A product is shown as missed where it takes more than 1.05 of cuBLAS's time.",
        (
            Headline(
                "step, same bits in any batch",
                first["plain ms"] / first["mode ms"],
                "without the mode",
            ),
        ),
    )
