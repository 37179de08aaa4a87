"""Chart of a whole GRPO run: rewards by step, and what a step takes; README's lines on it."""

from __future__ import annotations

import statistics
from typing import Any

from charts.draw import WIDTH, Bar, Chart, Group, Headline, Line, Panel, judged
from charts.pick import digits, one

_TRAINERS = {"stock": ("TRL", "peer"), "mmpack": ("TRL with mmpack", "own")}
_STAGES = {
    "step": "a step, all of it",
    "train": "forward and backward",
    "old": "old logprobs",
    "reference": "reference logprobs",
    "generation": "generation, TRL's own in both",
}


def learn(report: dict[str, Any]) -> Chart:
    every, lines = report["settings"]["iterations"], []
    for trainer, (label, kind) in _TRAINERS.items():
        seeds = [c["reward"] for c in report["curves"] if c["trainer"] == trainer]
        mean = [statistics.fmean(values) for values in zip(*seeds, strict=True)]
        for name, rewards in (*(("", own) for own in seeds), (label, mean)):
            lines.append(Line(name, [(every * k, r) for k, r in enumerate(rewards)], kind))
    times = {t: one(report["rows"], section="seconds a step", trainer=t) for t in _TRAINERS}
    groups = []
    for stage, title in _STAGES.items():
        values = [(label, times[t][stage], kind) for t, (label, kind) in _TRAINERS.items()]
        group = Group(title, [Bar(label, v, f"{digits(v)} s", kind) for label, v, kind in values])
        groups.append(group if stage == "generation" else judged(group))
    faster = times["stock"]["step"] / times["mmpack"]["step"]
    return Chart(
        "Does TRL's GRPO learn the same with mmpack, and how fast?",
        [
            Panel("optimizer steps", [], lines=lines, y="mean reward of a generation"),
            Panel("seconds of an optimizer step; shorter is faster", groups),
        ],
        _note(report),
        (Headline("TRL's GRPO step, generation included", faster, "TRL alone"),),
    )


def readme(report: dict[str, Any], image: str, page: str) -> str:
    """README's lines: the chart, and what it shows."""
    seeds = len(report["curves"]) // len(_TRAINERS)
    return (
        f'\n<img src="{image}" alt="Rewards and seconds of GRPO in TRL" width="{WIDTH}">\n\n'
        f"A whole run of TRL's `GRPOTrainer`, {seeds} seeds, {report['device']}: [settings and figures]({page}).\n"
    )


def _note(report: dict[str, Any]) -> str:
    s = report["settings"]
    letters = f"always {s['letters']}" if len(s["letters"]) == 1 else f"{s['letters']} in turn"
    said = "; ".join(
        f"{row['of']} {row['stock']:.3f} and {row['mmpack']:.3f}, two standard errors of the difference "
        f"{row['two_standard_errors']:.3f}"
        for row in report["rows"]
        if row["section"] == "mean reward of both"
    )
    return (
        f"A Qwen2.5-VL of {report['parameters'] / 1e6:.0f} M weights, {s['supervised']} supervised steps from random; "
        f"{s['problems']} drawn problems, the right letter {letters}; {s['prompts']} of them in a generation with 8 "
        f"responses each, {s['iterations']} optimizer steps on it, micro-batches of {s['rows']}, pictures of "
        f"{s['pixels'][0]:,} to {s['pixels'][1]:,} pixels. Thin lines are seeds, whose runs shared the GPUs. Mean "
        f"rewards of TRL and of TRL with mmpack: {said}. Seconds are medians of runs alone on a GPU."
    )
