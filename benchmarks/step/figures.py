"""Figures of the step's benchmark: which peers are shown as one, and the seconds of each by model and workload."""

from __future__ import annotations

from typing import Any

from benchmarks.step.workloads import WORKLOADS

# Padded batches, and what is special in each.
PADDED = {
    "padded": "as TRL calls the model",
    "padded-tower": "with mmpack's attention in the tower",
    "padded-tower-no-mask": "with mmpack's attention in the tower and no mask",
    "liger": "with mmpack's attention in the tower and Liger's loss",
}
# Label and peers of each bar: the fastest of them is shown.
BARS = {
    "padded, as TRL": ("padded",),
    "padded, best": tuple(PADDED),
    "packing without padding, as verl": ("removed-padding",),
    "mmpack, plain packs": ("plain",),
    "mmpack, shared prefixes": ("shared",),
    "… and compiled layers": ("shared-compiled",),
}
_OTHERS = 3  # bars that are not mmpack's


def figures(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[float | str | None]]:
    """Of each (model, workload) that has bars of others and of mmpack: a bar's seconds, or why it did not run.

    None: not measured.
    """
    out = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        for workload in WORKLOADS:
            of_peer = {
                row["peer"]: row
                for row in rows
                if (row["model"], row["workload"]) == (model, workload)
            }
            bars = [_best([of_peer[p] for p in peers if p in of_peer]) for peers in BARS.values()]
            others, own = bars[:_OTHERS], bars[_OTHERS:]
            if all(any(bar is not None for bar in of) for of in (others, own)):
                out[model, workload] = bars
    return out


def _best(rows: list[dict[str, Any]]) -> float | str | None:
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    if seconds:
        return float(min(seconds))
    return str(rows[0]["did_not_run"]) if rows else None


def seconds(value: float) -> str:
    """Three digits or so."""
    return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"


def name_of(model: str) -> str:
    """`qwen2.5-vl-7b` as its makers write it."""
    return model.replace("qwen", "Qwen").replace("-vl-", "-VL-").replace("b", "B")
