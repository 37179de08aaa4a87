"""The chart of the chain: how far logprobs move, plainly and within the batch-invariant mode."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Chart, Group, Panel
from charts.pick import Row, fraction

_LOGPROB = ("logprob", "forward")
_INVARIANT = ", invariant"
_BESIDE = "alone"  # the reference beside transformers' own attention
NO_AXES = ("section", "stage", "pass", "kind")  # all other columns are axes
_COLUMNS = (*NO_AXES, _BESIDE)
_RANKS = ("tensor_parallel", "sequence_parallel", "fsdp", "tp ")  # beginnings of their axes


def chain(report: dict[str, Any]) -> Chart:
    rows = [row for row in report["rows"] if (row.get("stage"), row.get("pass")) == _LOGPROB]
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        name = row["section"].removesuffix(_INVARIANT)
        own = row["section"] != name
        bars = groups.setdefault(name, [])
        if not own and row.get(_BESIDE):
            bars.append(_bar("transformers' own attention", [row[_BESIDE]], "floor"))
        cells = [cell for axis, cell in row.items() if axis not in _COLUMNS and cell]
        bars.append(_bar("batch-invariant", cells, "own") if own else _bar("plain", cells, "peer"))
    compared = {
        "ranks" if axis.startswith(_RANKS) else "layouts"
        for row in rows
        for axis, cell in row.items()
        if axis not in _COLUMNS and cell
    }
    return Chart(
        f"How far do logprobs move between {' and '.join(sorted(compared))}?",
        [
            Panel(
                "largest difference from each sample alone, nats; shorter is nearer",
                [Group(name, bars) for name, bars in groups.items()],
            )
        ],
        "Two decoder layers and two tower blocks at the widths of 7B and 8B models, random weights, bf16. Behind "
        "each difference is the error from float32, as a share of the contract's bound. Within `mmpack.invariant`, "
        "ranks are compared with one rank that sums with the same tree.",
    )


def _bar(label: str, cells: list[Row | str], kind: str) -> Bar:
    off = [cell for cell in cells if isinstance(cell, dict)]
    if not off:
        return Bar(label, 0.0, "equal bits", kind)
    most = max(cell["diff"] for cell in off)
    shares = [cell["of bound"] for cell in off if "of bound" in cell]
    said = f"{most:.2g} nats" + (f", {fraction(max(shares))} of the bound" if shares else "")
    return Bar(label, most, said, kind)
