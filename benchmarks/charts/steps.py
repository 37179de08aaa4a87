"""Charts of what a step consists of: towers, data on its way to the device, kept features, a process's first step."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row, cases, digits, milliseconds, of_best, one

from benchmarks.step.figures import seconds
from benchmarks.step.targets import FIRST

_ALONE = "one by one"


def towers(report: dict[str, Any]) -> Chart:
    time = "forward_backward_ms"
    groups = []
    for (shape,), rows in cases(report["rows"], "shape").items():
        best = of_best(rows, time)[time]
        bars = []
        for row in rows:
            peer = row["backend"] == _ALONE
            kind = "peer" if peer else "own" if row["chosen"] else "own, another way"
            said = milliseconds(row[time])
            if row["chosen"] and row[time] > best:
                kind, said = "missed", f"{said}, {digits(row[time] / best)} × the best"
            label = "transformers, one by one" if peer else row["backend"]
            bars.append(Bar(label + ", chosen" * row["chosen"], row[time], said, kind))
        groups.append(Group(shape, bars))
    rows = next(iter(cases(report["rows"], "shape").values()))
    faster = one(rows, backend=_ALONE)[time] / one(rows, chosen=True)[time]
    return Chart(
        "How long does one layer of a vision tower attend?",
        [Panel("ms, forward and backward; shorter is faster", groups)],
        "One layer, 16 heads, bf16. transformers' sdpa runs each window, picture or tile by itself. What mmpack "
        "chooses is shown as missed where anything else was faster.",
        (Headline("attention of a tower's windows", faster, "one by one"),),
    )


def loader(report: dict[str, Any]) -> Chart:
    exposed, copies = [], []
    for kind in ("float32", "uint8"):
        bars = []
        for who, of in (("by hand", "peer"), ("PackLoader", "own")):
            row = one(report["rows"], section="a loop", case=kind, who=who)
            said = milliseconds(row["exposed_ms"])
            if "hidden_after_first" in row:
                said += f", {row['hidden_after_first']:.0%} hidden after the first batch"
            bars.append(Bar(who, row["exposed_ms"], said, of))
        exposed.append(judged(Group(f"pixels as {kind}", bars)))
        bars = []
        for who, of in (("pageable", "peer"), ("pinned", "own")):
            row = one(report["rows"], case=kind, who=f"to the device, {who}")
            bars.append(Bar(f"{who} memory", row["ms"], milliseconds(row["ms"]), of))
        copies.append(judged(Group(f"pixels as {kind}", bars)))
    hand, own = (
        one(report["rows"], section="a loop", case="float32", who=who)["exposed_ms"]
        for who in ("by hand", "PackLoader")
    )
    return Chart(
        "How long does the device wait for a step's data?",
        [
            Panel("ms of a loop beyond the device's work; shorter is better", exposed),
            Panel("ms of one batch to the device; shorter is faster", copies),
        ],
        "64 samples of 4,096 tokens, 16 pictures of 896 × 896. The loop takes them twice, six micro-batches each time, "
        "and the device works 0.3 s on each; it is timed once, after an untimed one. By hand: plan, pack and `.to`, "
        "one after the other. Copies: all samples in one batch.",
        (
            Headline(
                "data of a step, as the loop waits for it", hand / own, "plan, pack, to by hand"
            ),
        ),
    )


def features(report: dict[str, Any]) -> Chart:
    groups = []
    for row in report["rows"]:
        bars = [
            Bar(label, row[f"seconds_{way}"], f"{seconds(row[f'seconds_{way}'])}, {patches}", kind)
            for way, label, kind in (
                ("each_pass", "encoded in each pass", "peer"),
                ("kept", "encoded once", "own"),
            )
            for patches in [f"{row[f'patches_{way}']:,} patches"]
        ]
        groups.append(judged(Group(row["step"], bars)))
    first = report["rows"][0]
    return Chart(
        "What does encoding a picture once a step save?",
        [Panel("seconds of a step; shorter is faster", groups)],
        "Prompts of one 896 × 896 picture; a prompt's samples lie in two micro-batches. Logprobs of both ways are "
        "compared before.",
        (Headline("a step of a frozen tower, encoded once", first["ratio"], "in each pass"),),
    )


def first_step(report: dict[str, Any]) -> Chart:
    groups = [
        Group(f"{layers} layers", [_first(row) for row in rows])
        for (layers,), rows in cases(report["rows"], "layers").items()
    ]
    return Chart(
        "How much longer than the others does a process's first step take?",
        [Panel("seconds; shorter is better", groups, mark=(FIRST, f"target {FIRST:g} s"))],
        "Random weights of real widths, few layers: all layers of a kind share a graph, so more layers cost no more. "
        "With empty caches everything is compiled, which no target asks to be fast.",
    )


def _first(row: Row) -> Bar:
    value = max(0.0, row["more_seconds"])
    said = f"{seconds(value)}, then {seconds(row['others_seconds'])} a step"
    if row["caches"] == "empty":
        return Bar("caches empty", value, said, "beside")
    ahead = row.get("ahead_seconds")
    label = "caches full" if ahead is None else f"caches full, {seconds(ahead)} compiled ahead"
    return Bar(label, value, said, "own" if value <= FIRST else "missed")
