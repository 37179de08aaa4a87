"""Charts of what moves rows: gathers, the cache, patches of clips."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, milliseconds, of_best, one, shares

COPY = "copy of as many bytes"
LEAST = 0.9  # of a copy's rate, that patches are to reach


def gathers(report: dict[str, Any]) -> Chart:
    kinds = {"mmpack": "own", "mmpack, inverse not given": "own, another way", COPY: "left out"}
    groups = [
        judged(shares(case, rows, "of_this_copy", kinds, "ms"), higher=True)
        for (case,), rows in cases(report["rows"], "case").items()
    ]
    return Chart(
        "How near do gathers and merges come to a copy of as many bytes?",
        [Panel("share of that copy's rate; longer is faster", groups, mark=(1, "the copy"))],
        "Both are timed alike; in the smallest cases most of either is a launch.",
        (
            _headline(report, "gather [32768, 3584] bf16", "gather of rows", "of_this_copy"),
            _headline(
                report,
                "unpack's backward, 16384 rows of 30720",
                "backward of unpack",
                "of_this_copy",
            ),
            _headline(
                report, "merge [32768, 3584] bf16, 0 levels", "merge of vision rows", "of_this_copy"
            ),
        ),
    )


def cache(report: dict[str, Any]) -> Chart:
    kinds = {"mmpack": "own", COPY: "floor"}
    groups = [
        judged(shares(case, rows, "of_floor", kinds, "ms"), higher=True)
        for (case,), rows in cases(report["rows"], "case").items()
    ]
    return Chart(
        "How fast are rows read from and written to the cache?",
        [Panel("share of a large copy's rate; longer is faster", groups, mark=(1, "a large copy"))],
        "Blocks of 16 rows in random order. The rate is that of a copy of gigabytes.",
        (
            _headline(report, "read all layers", "KV read from the cache", "of_floor"),
            _headline(report, "write all layers", "KV written to the cache", "of_floor"),
        ),
    )


def _headline(report: dict[str, Any], case: str, what: str, share: str) -> Headline:
    rows = [row for row in report["rows"] if row["case"] == case]
    own = one(rows, who="mmpack")
    peer = of_best([row for row in rows if not row["who"].startswith(("mmpack", COPY))], "ms")
    name = peer["who"].partition(":")[0]
    return Headline(what, peer["ms"] / own["ms"], name, own[share], "a copy")


def patches(report: dict[str, Any]) -> Chart:
    found = cases([r for r in report["rows"] if "a tensor a clip" not in r.get("case", "")], "case")
    groups = []
    for (case,), rows in found.items():
        family, _, what = case.partition(", ")
        if family == "qwen2_5_vl":
            groups.append(Group(what, [_patches(row, rows) for row in rows]))
    rows = found[("qwen2_5_vl, channels first, uint8 to float32, normalised",)]
    own = of_best([row for row in rows if row["who"].startswith("mmpack")], "ms")
    peer = of_best([row for row in rows if not row["who"].startswith("mmpack")], "ms")
    return Chart(
        "How near does pack_video come to a copy, beside torch and transformers?",
        [Panel("share of a copy's rate; longer is faster", groups, mark=(LEAST, "aim"))],
        "1,000 clips as patches of Qwen2.5-VL, of 14 pixels; those of Qwen3-VL, of 16, are in the table. Where the "
        f"better of the two kernels stays below {LEAST}, it is shown as missed.",
        (
            Headline(
                "clips to patches",
                peer["ms"] / own["ms"],
                peer["who"],
                own["of_floor"],
                "a copy",
            ),
        ),
    )


def _patches(row: Row, rows: list[Row]) -> Bar:
    own = [r["of_floor"] for r in rows if r["who"].startswith("mmpack")]
    kind = "peer"
    if row["who"].startswith("mmpack"):
        best = row["of_floor"] == max(own)
        kind = "own, another way" if not best else "own" if max(own) >= LEAST else "missed"
    return Bar(
        row["who"], row["of_floor"], f"{row['of_floor']:.2f} · {milliseconds(row['ms'])}", kind
    )
