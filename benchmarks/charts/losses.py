"""Charts of losses, returns and rewards."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, microseconds, of_best, one

_VARIANTS = ("grpo", "gspo + kl + sequence mis")
_STAGES = "+ the last block reads all sums"
_NAMES = {"triton": "mmpack, Triton", "torch": "torch", "framework": "a framework's loop"}
_KINDS = {"triton": "own"}
_LOG = "µs, log; to the left is faster"


def policy(report: dict[str, Any]) -> Chart:
    floors = {
        count: min(row["forward_us"] for row in rows)
        for (count,), rows in cases(_floors(report["rows"]), "tokens").items()
    }
    groups = []
    for (shape, variant), rows in cases(report["rows"], "shape", "variant").items():
        if variant in _VARIANTS:
            floor = floors[shape.partition("N = ")[2]]
            bars = [_dot(row, "what", "forward_us", floor) for row in rows]
            groups.append(judged(Group(f"{variant}, {shape}", bars)))
    rows = cases(report["rows"], "shape", "variant")["B = 32, N = 13,107", "grpo"]
    own, peer = one(rows, what="triton"), one(rows, what="torch")
    return Chart(
        "How long does the GPU take for a policy loss?",
        [
            Panel(
                f"forward, {_LOG}", groups, log=True, tick="a kernel with only the stages of a loss"
            )
        ],
        "The stages: read two columns, write one, sum in blocks, the last block adds up, on as many tokens; the last "
        "of their rows in the table. With a grid of its own a loss can be faster. torch: mmpack's, in plain torch.",
        (
            Headline(
                "policy loss, GRPO",
                peer["forward_backward_us"] / own["forward_backward_us"],
                "plain torch",
                min(floors["13,107"] / own["forward_us"], 1.0),
                "its stages, forward",
            ),
        ),
    )


def _floors(rows: list[Row]) -> list[Row]:
    return [
        row | {"tokens": row["shape"].removeprefix("N = ").rpartition(", ")[0]}
        for row in rows
        if row.get("variant") == _STAGES
    ]


def _dot(row: Row, who: str, column: str, floor: float | None = None) -> Bar:
    name = row[who]
    return Bar(
        _NAMES[name], row[column], microseconds(row[column]), _KINDS.get(name, "peer"), floor
    )


def returns(report: dict[str, Any]) -> Chart:
    groups = []
    for (shape,), rows in cases(report["rows"], "shape").items():
        bars = [_dot(row, "backend", "us", row.get("copy_us")) for row in rows]
        what = rows[0]["what"].replace("loop over columns", "discounted_returns")
        groups.append(judged(Group(f"{what}, {shape}", bars)))
    rows = next(iter(cases(report["rows"], "shape").values()))
    own, loop = one(rows, backend="triton"), one(rows, backend="framework")
    return Chart(
        "How long do returns of a million loss tokens take?",
        [Panel(_LOG, groups, log=True, tick="a copy of as many bytes")],
        "A framework's loop goes over columns of a padded batch; torch: mmpack's "
        "backend in plain torch.",
        (Headline("discounted returns", loop["us"] / own["us"], "a loop over columns"),),
    )


def rewards(report: dict[str, Any]) -> Chart:
    floor = report["floors"]["empty_launch_us"]
    groups = []
    for (what, shape), rows in cases(report["rows"], "what", "shape").items():
        if what.endswith((" grpo", " last")):
            groups.append(
                judged(
                    Group(f"{what}, {shape}", [_dot(row, "backend", "us", floor) for row in rows])
                )
            )
    rows = cases(report["rows"], "what", "shape")["group_advantages grpo", "B = 512"]
    own = of_best([row for row in rows if row["backend"] != "torch"], "us")
    torch = one(rows, backend="torch")
    return Chart(
        "How long does the GPU take for advantages and for rewards on their tokens?",
        [Panel(_LOG, groups, log=True, tick="an empty launch")],
        "torch: mmpack's backend in plain torch.",
        (
            Headline(
                "advantages of 512 samples",
                torch["us"] / own["us"],
                "plain torch",
                floor / own["us"],
                "an empty launch",
            ),
        ),
    )
