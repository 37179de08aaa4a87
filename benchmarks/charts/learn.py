"""Chart of a whole GRPO run: rewards by step, and what a step takes; README's lines on it."""

from __future__ import annotations

import statistics
from typing import Any

from charts.draw import WIDTH, Bar, Chart, Group, Headline, Line, Panel, judged
from charts.pick import digits, one

_NAMES = {"stock": ("TRL", "peer"), "mmpack": ("TRL with mmpack", "own")}
_STAGES = {
    "step": "a step, all of it",
    "train": "forward and backward",
    "old": "old logprobs",
    "reference": "reference logprobs",
    "generation": "generation, TRL's own in both",
}


def learn(report: dict[str, Any]) -> Chart:
    lines = []
    for trainer, (label, kind) in _NAMES.items():
        of = [c["reward"] for c in report["curves"] if c["trainer"] == trainer]
        mean = [statistics.fmean(values) for values in zip(*of, strict=True)]
        every = report["settings"]["iterations"]
        lines += [Line("", [(every * k, r) for k, r in enumerate(c)], kind, True) for c in of]
        lines.append(Line(label, [(every * k, r) for k, r in enumerate(mean)], kind))
    times = {t: one(report["rows"], section="seconds a step", trainer=t) for t in _NAMES}
    groups = [
        judged(
            Group(
                title,
                [Bar(*_bar(t, times[t][stage])) for t in _NAMES],
            )
        )
        for stage, title in _STAGES.items()
    ]
    faster = times["stock"]["step"] / times["mmpack"]["step"]
    return Chart(
        "TRL's GRPO on pictures, with mmpack and without: the same curve, in less time?",
        [
            Panel("optimizer steps", [], lines=(lines, "mean reward of a generation")),
            Panel("seconds of an optimizer step; shorter is faster", groups),
        ],
        _note(report),
        (Headline("TRL's GRPO step, generation included", faster, "TRL alone"),),
    )


def readme(report: dict[str, Any], image: str, page: str) -> str:
    """README's lines: the chart, and what it shows."""
    chart = learn(report)
    seeds = len(report["curves"]) // 2
    return (
        f'\n<img src="{image}" alt="{chart.title}" width="{WIDTH}">\n\n'
        f"A whole run of TRL's `GRPOTrainer`, {seeds} seeds, {report['device']}: [settings and figures]({page}).\n"
    )


def _bar(trainer: str, value: float) -> tuple[str, float, str, str]:
    label, kind = _NAMES[trainer]
    return label, value, f"{digits(value)} s", kind


def _note(report: dict[str, Any]) -> str:
    s = report["settings"]
    within = [r for r in report["rows"] if r["section"] == "both trainers"]
    said = "; ".join(
        f"{r['mean_reward_of']} {r['stock']:.3f} and {r['mmpack']:.3f}, two standard errors of their difference "
        f"{r['two_standard_errors']:.3f}"
        for r in within
    )
    return (
        f"A Qwen2.5-VL of {report['parameters'] / 1e6:.0f} M random weights, {s['problems']} drawn problems, "
        f"{s['prompts']} of them with 8 responses each in a generation, {s['iterations']} optimizer steps on it, "
        f"micro-batches of {s['rows']}, pictures of {s['pixels'][0]:,} to {s['pixels'][1]:,} pixels. Thin lines: "
        f"seeds, whose runs shared GPUs. Mean rewards, TRL and with mmpack: {said}. Seconds: medians of a run alone on a GPU."
    )
