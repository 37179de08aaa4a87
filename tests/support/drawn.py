"""One of each that `mmpack view` draws: answers in groups with pictures, their pack and plan, a report that differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.groups import answered

import mmpack as mp
from mmpack.schema.sample import Sample
from mmpack.schema.spans import Score

CAUSES = Path(__file__).resolve().parents[2] / "fixtures/causes"
PLANTED = ("max_pixels", "position_rule", "dropped_image")


def answers(groups: int = 3, count: int = 4) -> list[Sample]:
    """Prompts with a picture and answers of unlike lengths, with logprobs and two rewards."""
    rng = np.random.default_rng(0)
    out = []
    for g in range(groups):
        for k in range(count):
            prompt, answer = [100 + g] * (20 + 9 * g), [7 + k] * (30 * (k + 1))
            sample = answered(f"{g}/{k}", f"g{g}", prompt, answer, (1, 4, 4 + 2 * g))
            sample.rollout_logprobs = -rng.exponential(size=len(answer)).astype(np.float32)
            sample.rewards = [Score("exact", float(k % 2)), Score("format", 0.25 * k)]
            out.append(sample)
    return out


def packed() -> mp.PackedBatch:
    samples = answers()
    advantages = [np.linspace(-1, 1, s.num_loss_tokens, dtype=np.float32) for s in samples]
    return mp.pack(samples, share_prefix=True, loss_columns={"advantages": advantages})


def planned() -> mp.Plan:
    return mp.plan(answers(), max_tokens=400, ranks=3, share_prefix=True)


def sides() -> tuple[list[Sample], list[Sample]]:
    """Rollout and trainer of three planted causes, and of equal layouts with other logprobs."""
    left, right = [], []
    for cause in PLANTED:
        for side, name in ((left, "rollout"), (right, "train")):
            (sample,) = mp.read_trace(CAUSES / cause / f"{name}.jsonl")
            sample.sample_id = cause
            side.append(sample)
    for sample in answers(1, 2):
        other = Sample.from_dict(sample.to_dict(numpy=True))
        other.rollout_logprobs = sample.rollout_logprobs + np.float32(0.125)
        left.append(sample)
        right.append(other)
    return left, right


def reported() -> mp.ParityReport:
    return mp.compare(*sides())
