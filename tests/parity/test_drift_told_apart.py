"""Planted drifts are told by the axis that they are in, of several strengths; healthy engines suggest nothing."""

import numpy as np
import pytest
from scipy.stats import linregress
from support.drifts import PLANTS, facts, healthy, planted, rollouts

from mmpack.parity.drift import logprob_drift
from mmpack.parity.drift_contrasts import Table, contrasts, told_apart
from mmpack.parity.drift_tokens import Axis
from mmpack.schema.spans import LossSpan

SAYS = {
    "after": "after a picture or video",
    "image": "after a picture (",
    "video": "after a video",
    "near": "right after a picture or video",
    "media": "in samples with pictures or video",
    "stale": "in tokens of version 6",
    "older": "up to version 7",
    "newest": "in tokens of version 9",
    "turns": "from turn 1 on",
    "last turn": "from turn 2 on",
    "position": "grows with position (",
    "limit": "from token ",
    "decoding": "grows with position in the response",
    "beginning": "up to response token ",
    "length": "in samples of ",
}
LOOKS = {
    "medium": ("mRoPE", "merged"),
    "modality": ("positions",),
    "version": ("stale weights", "checksums"),
    "turn": ("encoded again",),
    "position": ("rotary", "window"),
    "response": ("KV cache", "prefill"),
    "length": ("long samples",),
}


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "times", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 200))]
)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_drift_is_told(name, times):
    axis, _ = PLANTS[name]
    for seed in range(2):
        rng = np.random.default_rng([seed, times])
        samples = rollouts(rng, 96)
        drift = logprob_drift(samples, planted(rng, samples, name, times, 1e-4))
        first = drift.suggests[0]
        assert SAYS[name] in first, (seed, drift.suggests)
        assert first == drift.axes[axis].suggests
        assert any(look in first for look in LOOKS[axis])
        # any other line is of an axis that has the very same tokens
        assert all("the same tokens" in line for line in drift.suggests[1:]), drift.suggests


def test_healthy_engines_suggest_nothing():
    said = []
    for seed in range(80):
        rng = np.random.default_rng([7, seed])
        samples = rollouts(rng, int(rng.choice([2, 5, 12, 40])))
        size = 10 ** rng.uniform(-6.5, -1.3)
        drift = logprob_drift(samples, planted(rng, samples, None, 1, size))
        said += [line for line in drift.suggests if not line.startswith("not told apart by")]
        said += [axis.suggests for axis in drift.axes.values() if axis.suggests]
        if drift.ok:
            said += drift.suggests
    assert said == []


def test_drift_everywhere_is_said_to_be_everywhere():
    rng = np.random.default_rng(3)
    samples = rollouts(rng)
    (line,) = logprob_drift(samples, planted(rng, samples, None, 1, 1e-2)).suggests
    assert line.startswith(
        "not told apart by modality, medium, position, response, length, turn, version"
    )
    assert "dtype, temperature" in line


@pytest.mark.parametrize(("chosen", "times"), [([5], 1000), ([3, 9, 17, 30], 50)])
def test_drift_of_a_few_samples_names_them(chosen, times):
    """Of which no axis tells."""
    rng = np.random.default_rng(3)
    samples = rollouts(rng)
    noise = healthy(rng, samples, 2e-3)
    for k in chosen:
        noise[k] = noise[k] * times
    train = [s.rollout_logprobs + x for s, x in zip(samples, noise, strict=True)]
    (line,) = logprob_drift(samples, train).suggests
    assert line.startswith(f"mostly in {len(chosen)} of 48 samples, ")
    assert line.count("'s") == min(len(chosen), 3) and (len(chosen) > 3) == (" and 1 more" in line)
    if chosen == [5]:
        assert "'s5': " in line
        inside = np.abs(noise[5]).mean()
        share = np.abs(noise[5]).sum() / np.abs(np.concatenate(noise)).sum()
        assert f"{share:.0%} of it (mean |Δ| {inside:.1e}" in line


def test_a_cause_that_is_known_is_not_said_twice():
    rng = np.random.default_rng(3)
    samples = rollouts(rng)
    drift = logprob_drift(samples, planted(rng, samples, None, 1, 1e-2), dtype=None, version="0")
    assert set(drift.causes) == {"stale_weights"} and drift.suggests == ()


def test_two_drifts_at_once_are_both_told():
    rng = np.random.default_rng(5)
    samples = rollouts(rng, 96)
    train = []
    for sample, noise in zip(samples, healthy(rng, samples, 1e-4), strict=True):
        f = facts(sample)
        both = np.where(f["version"] == "6", 30, 1) * np.where(f["turn"] >= 1, 10, 1)
        train.append(sample.rollout_logprobs + noise * both)
    lines = logprob_drift(samples, train).suggests
    assert len(lines) == 2
    assert "in tokens of version 6" in lines[0] and "from turn 1 on" in lines[1]


def test_the_trainer_s_version_says_which_weights_are_stale():
    rng = np.random.default_rng(5)
    samples = rollouts(rng, 96)
    for sample in samples:
        for v in sample.policy_versions:
            v.version = {"6": "b", "7": "a", "8": "a", "9": "a"}[v.version]  # in no order
    train = planted(rng, samples, "turns", 1, 1e-4)
    for sample, x in zip(samples, train, strict=True):
        x[facts(sample)["version"] == "b"] += 0.1
    lines = [logprob_drift(samples, train, version=v).suggests[0] for v in ("a", "b", None)]
    assert all("in tokens of version b" in line for line in lines)
    assert "stale weights" in lines[0]
    assert "stale weights" not in lines[1] + lines[2]


def test_axes_that_have_the_same_tokens_are_both_named():
    """Where each picture stands before all loss tokens, "after a picture" and "in samples with pictures" are one."""
    rng = np.random.default_rng(6)
    samples = rollouts(rng)
    for sample in samples:
        sample.modality_spans = [s for s in sample.modality_spans if s.modality == "video"]
    drift = logprob_drift(samples, planted(rng, samples, "video", 20, 1e-4))
    assert len(drift.suggests) == 2
    assert "after a video" in drift.suggests[0]
    assert drift.suggests[1] == drift.axes["modality"].suggests
    assert drift.suggests[1].endswith("(as medium does: the same tokens)")


def test_an_axis_that_only_goes_along_says_so_and_few_samples_tell_nothing():
    for count, size in ((96, 1e-4), (96, 1e-7), (7, 1e-3), (1, 1e-3)):
        rng = np.random.default_rng(8)
        samples = rollouts(rng, count)
        drift = logprob_drift(
            samples, planted(rng, samples, "turns", 200 if size > 1e-7 else 20, size)
        )
        if size == 1e-7:  # as two engines in fp32
            assert drift.ok and drift.suggests == ()
        elif count < 8:
            assert all(line.startswith("not told apart by") for line in drift.suggests)
        else:
            said = "stands out only as far as turn explains it"
            assert drift.axes["position"].suggests == said


def test_turns_and_versions_that_are_not_recorded_take_no_part():
    rng = np.random.default_rng(11)
    samples = rollouts(rng, 96)
    train = planted(rng, samples, None, 1, 1e-4)
    for sample, x in zip(samples[::2], train[::2], strict=True):
        sample.policy_versions = None
        sample.loss_spans = [LossSpan(s.start, s.stop) for s in sample.loss_spans]
        x += 0.05
    drift = logprob_drift(samples, train)
    assert drift.axes["turn"].groups[-1].name == "not recorded"
    assert drift.axes["version"].groups[-1].name == "not recorded"
    assert drift.axes["turn"].suggests == drift.axes["version"].suggests == ""


def test_a_contrast_is_a_regression():
    """Slope and explained sum of squares against scipy; the error against drawing samples anew, 800 times."""
    rng = np.random.default_rng(12)
    owner = np.repeat(np.arange(40), 50)
    code = rng.integers(0, 4, (40, 50))
    code[:20] //= 2  # samples differ in their groups, and move together
    code = code.ravel()
    y = 0.7 * code / 3 + rng.normal(0, 0.2, 40)[owner] + rng.normal(0, 0.3, len(owner))
    one = np.ones(len(owner))
    axis = Axis(("0", "1", "2", "3"), code, ordered=True)
    (found,) = told_apart({"length": Table.of(axis, owner, code, one, y)}, one)
    assert found.best.kind == "grows"
    x = next(c.x for c in contrasts("length", axis) if c.kind == "grows")[code]
    line = linregress(x, y)
    assert np.log(found.best.times) == pytest.approx(line.slope, rel=1e-9)
    total = ((y - y.mean()) ** 2).sum()
    assert found.best.explains == pytest.approx(line.rvalue**2 * total, rel=1e-9)
    again = []
    for _ in range(800):
        rows = (rng.integers(0, 40, 40)[:, None] * 50 + np.arange(50)).ravel()
        again.append(np.polyfit(x[rows], y[rows], 1)[0])
    assert found.best.error == pytest.approx(np.std(again), rel=0.1)
    assert found.best.error > 1.3 * line.stderr
