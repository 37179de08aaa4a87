"""Charts of what several GPUs share: the rows of one pack, and the pictures of a step."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, digits, memory, of_best, one

TOGETHER = "pictures encoded together"


def sequence_parallel(report: dict[str, Any]) -> Chart:
    """One pack over several GPUs beside one."""
    speed, room = [], []
    for (pack, count), rows in cases(report["rows"], "pack", "rows").items():
        title = f"{pack}: {count:,} rows"
        speed.append(Group(title, [_speed(row) for row in rows]))
        room.append(Group(title, [_room(row) for row in rows]))
    most = max(report["rows"], key=lambda row: row["ranks"])
    best = max(r["speed_up"] for r in report["rows"] if r["ranks"] == most["ranks"])
    what = f"one pack split over {most['ranks']} GPUs"
    return Chart(
        "How much faster is one pack with its rows split over GPUs, and in how much memory?",
        [
            Panel("times as fast as one GPU; longer is better", speed, tick="as many as GPUs"),
            Panel("GB on the fullest GPU; weights are whole on each", room, tick="without weights"),
        ],
        "Forward and backward of one pack and the sum of gradients, bf16 with gradient checkpointing, over NCCL. "
        "Before, logprobs and gradients of the same packs, with two decoder layers, were held to the contract.",
        (Headline(what, share=best / most["ranks"], floor=f"{most['ranks']} times"),),
    )


def _speed(row: Row) -> Bar:
    said = f"{row['speed_up']:.2f} × · {digits(row['seconds'])} s"
    return Bar(_gpus(row), row["speed_up"], said, "own", row["ranks"])


def _room(row: Row) -> Bar:
    peak, beyond = row["peak_bytes"], row["beyond_weights_bytes"]
    return Bar(_gpus(row), peak / 1e9, memory(peak), "own", beyond / 1e9)


def _gpus(row: Row) -> str:
    return f"{row['ranks']} GPU" + "s" * (row["ranks"] > 1)


def megatron(report: dict[str, Any]) -> Chart:
    """A step of Megatron-Core on two GPUs, by layout."""
    panels = []
    for (layout,), rows in cases(report["rows"], "layout").items():
        bars = [
            Bar(
                row["way"],
                row["seconds"],
                f"{digits(row['seconds'])} s · {memory(row['peak_bytes'])}",
                "own" if row["way"].startswith("mmpack") else "peer",
            )
            for row in rows
        ]
        panels.append(Panel(f"{layout}: seconds of a step; shorter is better", [Group("", bars)]))
    best = max(row["speed_up"] for row in report["rows"])
    return Chart(
        "How long is a step of Megatron-Core, packed and shared?",
        panels,
        "A 7B-shaped Qwen2.5-VL by mbridge on local specs, bf16, layers recomputed, two GPUs, random weights. "
        "Megatron's padded forward is its own, with the tower's windows in one launch as mmpack has them.",
        (Headline("a step of Megatron-Core", best),),
    )


def together(report: dict[str, Any]) -> Chart:
    """Pictures on few ranks, in three ways."""
    found = cases(report["rows"], "section", "how", "ranks")
    groups = [
        judged(Group(f"{skew}; {how}, {ranks} GPUs", list(map(_way, rows))))
        for (skew, how, ranks), rows in found.items()
    ]
    most = max(ranks for _, _, ranks in found)
    rows = next(rows for (_, how, ranks), rows in found.items() if (how, ranks) == ("FSDP2", most))
    own, other = (
        one(rows, way=TOGETHER),
        of_best([r for r in rows if r["way"] != TOGETHER], "seconds"),
    )
    return Chart(
        "What does a step take whose pictures lie on few GPUs?",
        [Panel("seconds of a step; shorter is faster", groups)],
        "Forward and backward of all packs, bf16 with gradient checkpointing, over NCCL. Behind each bar: the patches "
        "that the busiest GPU encodes, and the mean of all. A plan balances rows and patches. Where pictures are "
        "encoded together, the plan balances rows only, and the exchange balances patches.",
        (Headline(TOGETHER, other["seconds"] / own["seconds"], other["way"]),),
    )


def _way(row: Row) -> Bar:
    said = f"{digits(row['seconds'])} s · {row['patches_most']:,} patches, mean {row['patches_mean']:,}"
    return Bar(row["way"], row["seconds"], said, "own" if row["way"] == TOGETHER else "peer")
