"""Rollouts with logprobs, what two healthy engines differ by, and drifts planted in some of their tokens."""

from __future__ import annotations

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, PolicyVersion


def rollout(rng: np.random.Generator, i: int) -> Sample:
    """Some prompts with a picture or a video, one to three turns, two or three versions, all lengths."""
    kind = ("text", "image", "video", "late")[rng.integers(4)]
    at = int(rng.integers(20, 400))
    media, loss, versions = [], [], []
    if kind in ("image", "video"):
        stop = at + int(rng.integers(16, 300))
        media.append(ModalitySpan(at, stop, kind, 0))
        at = stop + int(rng.integers(1, 60))
    newest = int(rng.integers(7, 10))
    for turn in range(int(rng.integers(1, 4))):
        stop = at + int(rng.integers(60, 300))
        loss.append(LossSpan(at, stop, turn=turn))
        middle = int(rng.integers(at, stop + 1))
        halves = (at, middle, newest - 1), (middle, stop, newest)
        versions += [PolicyVersion(a, b, str(v)) for a, b, v in halves if a < b]
        at = stop + int(rng.integers(5, 80))
        if kind == "late" and turn == 0:  # a screenshot that a tool returns
            media.append(ModalitySpan(at, at + 64, "image", 0))
            at += 70
    n = sum(s.stop - s.start for s in loss)
    since = np.concatenate([np.arange(s.stop - s.start) for s in loss])
    sure = rng.random(n) < (0.7 if media else 0.4) - 0.3 * (
        since < 20
    )  # more so after a medium, less at first
    logprobs = -np.where(sure, rng.exponential(1e-3, n), rng.exponential(1.0, n))
    return Sample(
        sample_id=f"s{i}",
        group_id=f"g{i // 4}",
        family="qwen2_5_vl",
        input_ids=np.full(at, 7),
        media=[],
        modality_spans=media,
        loss_spans=loss,
        rollout_logprobs=logprobs.astype(np.float32),
        sampling={"logprobs": "raw"},
        policy_versions=versions,
    )


def rollouts(rng: np.random.Generator, count: int = 48) -> list[Sample]:
    return [rollout(rng, i) for i in range(count)]


def healthy(rng: np.random.Generator, samples: list[Sample], size: float) -> list[np.ndarray]:
    """What two engines differ by: heavy tails, less at sure tokens, some samples more than others."""
    out = []
    for sample in samples:
        p = np.exp(sample.rollout_logprobs.astype(np.float64))
        own = size * np.exp(rng.normal(0, 0.3))
        out.append(own * (0.02 + 1 - p) * rng.standard_t(3, len(p)))
    return out


def facts(sample: Sample) -> dict[str, np.ndarray]:
    """Of each loss token, by a plain loop."""
    rows = []
    first = None
    for k, span in enumerate(sample.loss_spans):
        joined = k > 0 and sample.loss_spans[k - 1].stop == span.start
        first = first if joined else span.start
        for at in range(span.start, span.stop):
            before = [m for m in sample.modality_spans if m.stop <= at]
            version = [v.version for v in sample.policy_versions or () if v.start <= at < v.stop]
            rows.append(
                {
                    "position": at,
                    "response": at - first,
                    "length": len(sample),
                    "turn": sample.turn if span.turn is None else span.turn,
                    "version": version[0] if version else None,
                    "after": before[-1].modality if before else "",
                    "since": at - before[-1].stop if before else -1,
                    "kinds": "+".join(sorted({m.modality for m in sample.modality_spans})),
                }
            )
    return {name: np.array([row[name] for row in rows], object) for name in rows[0]}


PLANTS = {
    "after": ("medium", lambda f: f["after"] != ""),
    "image": ("medium", lambda f: f["after"] == "image"),
    "video": ("medium", lambda f: f["after"] == "video"),
    "near": ("medium", lambda f: (f["since"] >= 0) & (f["since"] < 64)),
    "media": ("modality", lambda f: f["kinds"] != ""),
    "stale": ("version", lambda f: f["version"] == "6"),
    "older": ("version", lambda f: np.isin(f["version"].astype(str), ["6", "7"])),
    "newest": ("version", lambda f: f["version"] == "9"),
    "turns": ("turn", lambda f: f["turn"] >= 1),
    "last turn": ("turn", lambda f: f["turn"] >= 2),
    "position": ("position", lambda f: f["position"].astype(float) / 500),
    "limit": ("position", lambda f: f["position"] >= 600),
    "decoding": ("response", lambda f: f["response"].astype(float) / 200),
    "beginning": ("response", lambda f: f["response"] < 20),
    "length": ("length", lambda f: f["length"] >= 700),
}


def planted(
    rng: np.random.Generator, samples: list[Sample], name: str | None, times: float, size: float
) -> list[np.ndarray]:
    """The trainer's logprobs: healthy noise, `times` as large where the plant is."""
    noise = healthy(rng, samples, size)
    if name is not None:
        where = PLANTS[name][1]
        noise = [
            x * (1 + (times - 1) * where(facts(s)).astype(float))
            for s, x in zip(samples, noise, strict=True)
        ]
    return [s.rollout_logprobs.astype(np.float64) + x for s, x in zip(samples, noise, strict=True)]
