"""Charts of the host: planning, packing, traces, clips, what a sample costs, and what its pictures do on their way."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel
from charts.pick import Row, cases, digits, fraction, memory, microseconds, milliseconds, one

_HEADLINES = {
    "best-fit-decreasing, 50,000": "bins, 50,000 samples",
    "balance 1,024 on 32, free counts": "balance of 1,024 on 32 ranks",
    "mRoPE positions, 64 x 4,096 tokens, 6 pictures each, together": "mRoPE positions",
}


def host(report: dict[str, Any]) -> Chart:
    groups = [_beside(row) for row in report["rows"] if "did_not_run" not in row]
    rows = {row["what"]: row for row in report["rows"] if "x_faster" in row}
    heads = [
        Headline(said, rows[what]["x_faster"], rows[what]["peer"])
        for what, said in _HEADLINES.items()
        if what in rows
    ]
    copies = [row for row in report["rows"] if row.get("peer") == "one copy of them"]
    if copies:
        heads.append(Headline("pack with pixels", share=copies[0]["x_faster"], floor="one copy"))
    return Chart(
        "How fast are planning and packing beside other code?",
        [
            Panel(
                "times as fast as the peer, log; longer is faster",
                groups,
                log=True,
                ratios=True,
                mark=(1, "as fast"),
                tick="floor that it is held to",
            )
        ],
        "A case below its floor is shown as missed, and one that does not reach its aim. A peer that does less (fewer "
        "samples, one budget, positions alone, a hash or a copy of the same bytes) says so in its name.",
        tuple(heads),
    )


def _beside(row: Row) -> Group:
    """Missed: below its floor, or not what it is to reach."""
    said = f"{digits(row['x_faster'])} ×, {milliseconds(row['ms'])}"
    missed = row["x_faster"] < row["floor"]
    if row["x_faster"] < row.get("aim_x", 0):
        missed, said = True, f"{said}, aim {digits(row['aim_x'])} ×"
    if row["ms"] > row.get("aim_ms", row["ms"]):
        missed, said = True, f"{said}, aim {milliseconds(row['aim_ms'])}"
    kind = "missed" if missed else "own"
    bar = Bar(f"beside {row['peer']}", row["x_faster"], said, kind, row["floor"])
    return Group(row["what"], [bar])


def parity(report: dict[str, Any]) -> Chart:
    groups = []
    for row in report["rows"]:
        fields = {"required": "required fields", "full": "every field"}[row["kind"]]
        title = (
            f"{row['format']}, {fields}: two files of {row['samples']:,}, {memory(row['bytes'])}"
        )
        read, compare = row["reader_seconds"], row["compare_seconds"]
        said = f"{digits(compare)} s, {row['x_reading']:.2f} × reading"
        bars = [Bar(f"read, {row['reader']}", read, f"{digits(read)} s", "floor")]
        bars.append(Bar("mp.compare", compare, said, "own"))
        groups.append(Group(title, bars))
    first = report["rows"][0]
    return Chart(
        "How much longer than reading both traces does comparing them take?",
        [Panel("CPU seconds; shorter is faster", groups)],
        f"Samples of {first['tokens']:,} tokens and {first['images']} pictures, all alike on both sides; no two share "
        "a prompt. Reading is by pyarrow or `json.loads` alone, with nothing done.",
        (
            Headline(
                "compare two Parquet traces", share=1 / first["x_reading"], floor="reading them"
            ),
        ),
    )


def scale(report: dict[str, Any]) -> Chart:
    parts: dict[str, Row] = {row["what"]: row for row in report["rows"]}
    most = sorted(parts.values(), key=lambda row: -row["us_each"])
    bars = [Bar(r["what"], r["us_each"], microseconds(r["us_each"]), "own") for r in most]
    return Chart(
        "What does a sample cost on the host, part by part?",
        [Panel("µs of one core per sample (or medium), log", [Group("", bars)], log=True)],
        "Samples of 1,024 tokens and one picture with every field filled; CPU time. What it comes to for many ranks "
        "is in [scale](../../docs/scale.md).",
    )


def video(report: dict[str, Any]) -> Chart:
    groups = []
    for (clip, every), rows in cases(report["rows"], "clip", "keyframe_every").items():
        bars = []
        for row in rows:
            auto = row["auto_over_straight"]
            bars.append(
                Bar(
                    f"beside {row['library']}", auto, f"{auto:.2f}", "missed" if auto > 1 else "own"
                )
            )
        groups.append(Group(f"{clip}, a keyframe every {every} frames", bars))
    worst = max(report["rows"], key=lambda row: row["auto_over_straight"])
    whole = [row["auto_over_everything"] for row in report["rows"]]
    return Chart(
        "How long does mmpack take to decode 32 of 300 frames, beside each decoder used straight?",
        [Panel("time over the decoder's own; shorter is faster", groups, mark=(1, "the decoder"))],
        "mmpack with the backend that it chooses by itself. Decoding only what is asked takes "
        f"{min(whole):.2f} to {max(whole):.2f} of decoding all frames.",
        (
            Headline(
                "decode 32 of 300 frames",
                1 / worst["auto_over_straight"],
                f"{worst['library']} used straight",
            ),
        ),
    )


def cost_model(report: dict[str, Any]) -> Chart:
    """Micro-batches, each predicted from the others."""
    timed = [row for row in report["rows"] if "workload" in row]
    groups = [
        Group(str(workload), [_predicted(row) for row in rows])
        for (workload,), rows in cases(timed, "workload").items()
    ]
    return Chart(
        "How near to measured seconds is the cost that was fitted to the other micro-batches?",
        [Panel("predicted over measured", groups, mark=(1, "as measured"))],
        "Forward, loss and backward of one micro-batch. One that is the only one of its kind can't be left out.",
    )


def _predicted(row: Row) -> Bar:
    name = f"{row['samples']} samples, {row['layout']}" if row["samples"] > 1 else "1 sample"
    ratio, took = row["left_out"], f"{digits(row['seconds'])} s"
    said = f"{took}, not left out" if ratio is None else f"{fraction(ratio)} × {took}"
    return Bar(name, ratio, said, "own")


def media(report: dict[str, Any]) -> Chart:
    rows = report["rows"]
    names = {
        "DataProto": "verl's DataProto",
        "reference float32": "by reference, float32",
        "reference uint8": "by reference, uint8",
    }
    panels = []
    for column, said in (
        ("held_mib", "MiB that all processes hold, the store included; shorter is better"),
        ("pipes_mib", "MiB through the processes' pipes; shorter is better"),
    ):
        bars = []
        for row in rows:
            kind = "peer" if row["way"] == "DataProto" else "own"
            bars.append(Bar(names[row["way"]], row[column], f"{digits(row[column])} MiB", kind))
        panels.append(Panel(said, [Group("", bars)]))
    theirs, ours = (one(rows, way=way)["held_mib"] for way in ("DataProto", "reference uint8"))
    return Chart(
        "How much memory do a step's pictures take on their way to the ranks?",
        panels,
        f"{rows[0]['samples']} samples with 4 pictures each, 8 responses a prompt: {rows[0]['pictures']} pictures of "
        f"112 × 112, from two rollout processes through a driver to two ranks. verl's DataProto holds "
        f"{digits(theirs / ours)} times as much as references to bytes do.",
    )


def ray_rows(report: dict[str, Any]) -> Chart:
    rows = report["rows"]
    speed, peaks = [], []
    for row in rows:
        name = f"{row['who']}, {row['rows']:,} rows"
        kind = "own" if row["who"] == "Ray Data" else "peer"
        speed.append(Bar(name, row["rows_per_second"], digits(row["rows_per_second"]), kind))
        peaks.append(Bar(name, row["peak_mib"], f"{digits(row['peak_mib'])} MiB", kind))
    return Chart(
        "How fast are rows through Ray Data, and in how much memory?",
        [
            Panel("rows a second; longer is faster", [Group("", speed)]),
            Panel("MiB of all processes at most; shorter is better", [Group("", peaks)]),
        ],
        f"Short rows of text, from rows to samples in the process that asks; actors: {rows[0]['actors']}, on "
        f"{report['device']}.",
    )
