"""Charts of a whole training step."""

from __future__ import annotations

from charts.draw import Bar, Chart, Group, Headline, Panel, judged
from charts.pick import Row

from benchmarks.step.figures import BARS, figures, name_of, seconds
from benchmarks.step.targets import HEADLINE
from benchmarks.step.workloads import WORKLOADS

_KINDS = ("peer", "peer", "peer", *("own, another way",) * 2, "own")
UNIT = "seconds, forward and backward; shorter is faster"
TICK = "floor: the FLOPs of shared prefixes at the rate of cuBLAS"
NOTE = (
    "The floor: what the FLOPs of a step that computes each prompt and each picture once take at the rate of cuBLAS's "
    "product in the same run, recomputation of checkpoints included."
)


def every(rows: list[Row]) -> Chart:
    """All models and workloads of `whole_runs`."""
    title = "How long does a training step take?"
    groups = [_group(rows, model, w, True) for model, w in figures(rows)]
    return Chart(title, [Panel(UNIT, groups, tick=TICK)], NOTE, tuple(_headlines(rows)))


def headline(rows: list[Row]) -> Chart:
    """The workloads of one model."""
    model = HEADLINE[0]
    found = [w for m, w in figures(rows) if m == model]
    title = f"How long does a training step of {name_of(model)} take? {rows[0]['device']}"
    groups = [_group(rows, model, w, False) for w in found]
    return Chart(title, [Panel(UNIT, groups, tick=TICK)], NOTE)


def _group(rows: list[Row], model: str, workload: str, named: bool) -> Group:
    own = [r for r in rows if (r["model"], r["workload"]) == (model, workload)]
    shown = {peer for peers in BARS.values() for peer in peers}
    ideals = [r["ideal_seconds"] for r in own if r["peer"] in shown and "ideal_seconds" in r]
    ideal = min(ideals, default=None)
    bars = []
    drawn = zip(BARS, figures(rows)[model, workload], _KINDS, strict=True)
    for label, value, kind in drawn:
        if isinstance(value, float):
            bars.append(Bar(label, value, seconds(value), kind, ideal))
        elif value is not None:
            bars.append(Bar(label, None, value, kind))
    about = WORKLOADS[workload].about
    return judged(Group(f"{name_of(model)}, {about}" if named else about, bars))


def _headlines(rows: list[Row]) -> list[Headline]:
    model = HEADLINE[0]
    if HEADLINE not in figures(rows):
        return []
    bars = dict(zip(BARS, figures(rows)[HEADLINE], strict=True))
    times = {label: value for label, value in bars.items() if isinstance(value, float)}
    others = {label: times[label] for label in list(BARS)[:3] if label in times}
    own = [times[label] for label in list(BARS)[3:] if label in times]
    if not others or not own:
        return []
    peer = min(others, key=lambda label: others[label])
    best = min(
        (
            r
            for r in rows
            if (r["model"], r["workload"]) == HEADLINE and r.get("seconds") == min(own)
        ),
        key=lambda r: r["seconds"],
    )
    said = f"training step, {name_of(model)}"
    share = best.get("of_ideal")
    return [Headline(said, others[peer] / min(own), peer, share, "cuBLAS's rate")]
