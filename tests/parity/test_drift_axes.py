"""Figures of a drift by axis against plain loops, effective sample sizes against scipy and torch; what is refused."""

import json
import math
import time

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from support.drifts import facts, planted, rollouts

from mmpack.errors import ArgumentError
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import LOG_RATIO_BOUND
from mmpack.parity.drift import logprob_drift
from mmpack.parity.drift_axes import BOUND, effective_size
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, PolicyVersion

NEAR = 30


def medium(f):
    """The group of a token, as the docs say it."""
    if not f["kinds"]:
        return "no medium"
    if not f["after"]:
        return "before a medium"
    where = f"up to {NEAR} after" if f["since"] < NEAR else "later after"
    return f"{where} {'an image' if f['after'] == 'image' else 'a video'}"


NAME = {
    "modality": lambda f: {"": "text only", "image": "images", "video": "video"}[f["kinds"]],
    "medium": medium,
    "turn": lambda f: str(f["turn"]),
    "version": lambda f: f["version"],
}


def within(name, value):
    low, _, high = name.partition(" to ")
    return int(low) <= value <= int(high or low)


@pytest.fixture(scope="module")
def told():
    rng = np.random.default_rng(0)
    samples = rollouts(rng, 30)
    train = planted(rng, samples, "turns", 300, 1e-3)
    rows = []
    for k, (sample, theirs) in enumerate(zip(samples, train, strict=True)):
        columns = facts(sample)
        for i, (a, b) in enumerate(zip(sample.rollout_logprobs, theirs, strict=True)):
            fact = {name: column[i] for name, column in columns.items()}
            rows.append(fact | {"sample": k, "d": float(b) - float(a)})
    return logprob_drift(samples, train, near=NEAR), rows


def same_figures(group, rows):
    d = [row["d"] for row in rows]
    n, weights = len(d), [math.exp(min(max(x, -20), 20)) for x in d]
    assert (group.tokens, group.samples) == (n, len({row["sample"] for row in rows}))
    assert group.max_abs == max(map(abs, d))
    assert group.mean_abs == pytest.approx(math.fsum(map(abs, d)) / n, rel=1e-9)
    assert group.mean == pytest.approx(math.fsum(d) / n, rel=1e-9, abs=1e-12)
    assert group.k3 == pytest.approx(math.fsum(math.expm1(x) - x for x in d) / n, rel=1e-9)
    square = math.fsum(w * w for w in weights)
    assert group.ess == pytest.approx(math.fsum(weights) ** 2 / (n * square), rel=1e-9)


@pytest.mark.parametrize("axis", NAME)
def test_groups_by_name(told, axis):
    drift, rows = told
    by: dict[str, list] = {}
    for row in rows:
        by.setdefault(NAME[axis](row), []).append(row)
    groups = drift.axes[axis].groups
    assert {g.name for g in groups} == by.keys() and len(groups) == len(by) > 2
    for group in groups:
        same_figures(group, by[group.name])


@pytest.mark.parametrize("axis", ["position", "response", "length"])
def test_groups_by_range(told, axis):
    drift, rows = told
    groups = drift.axes[axis].groups
    assert 4 <= len(groups) <= 8
    left = len(rows)
    for group in groups:
        inside = [row for row in rows if within(group.name, row[axis])]
        same_figures(group, inside)
        left -= len(inside)
    assert left == 0
    if axis != "length":  # whose values are those of few samples
        assert max(g.tokens for g in groups) < 1.3 * len(rows) / 8


def one(spans, length=40, **fields):
    n = sum(s.stop - s.start for s in spans)
    logprobs = np.full(n, -1, np.float32)
    sample = Sample("s", "g", "qwen2_5_vl", np.arange(length), [], [], spans, **fields)
    sample.rollout_logprobs = logprobs
    return sample, logprobs.astype(np.float64)


def names(drift, axis):
    return [(g.name, g.tokens) for g in drift.axes[axis].groups]


def test_responses_and_turns_of_spans():
    """A response is what is written without a break; spans without a turn have the sample's."""
    sample, train = one([LossSpan(2, 4, "reasoning"), LossSpan(4, 6), LossSpan(10, 12, turn=5)])
    sample.turn = 3
    drift = logprob_drift([sample], [train])
    assert names(drift, "response") == [("0", 2), ("1", 2), ("2", 1), ("3", 1)]
    assert names(drift, "turn") == [("3", 4), ("5", 2)]


def test_the_edges_of_media_and_versions():
    sample, train = one([LossSpan(10, 30)])
    sample.modality_spans = [ModalitySpan(3, 6, "video", 0), ModalitySpan(12, 15, "image", 1)]
    sample.policy_versions = [PolicyVersion(10, 20, "9"), PolicyVersion(22, 99, "10")]
    drift = logprob_drift([sample], [train], near=5)
    assert names(drift, "modality") == [("images and video", 20)]
    assert names(drift, "medium") == [
        ("up to 5 after an image", 5),
        ("later after an image", 10),
        ("up to 5 after a video", 1),
        ("later after a video", 4),
    ]
    assert names(drift, "version") == [("9", 10), ("10", 8), ("not recorded", 2)]


def test_many_turns_and_versions_come_together():
    spans = [LossSpan(2 * k, 2 * k + 1, turn=k) for k in range(1, 41)]
    sample, train = one(spans, 90)
    sample.policy_versions = [PolicyVersion(2 * k, 2 * k + 1, str(k)) for k in range(1, 41)]
    drift = logprob_drift([sample], [train])
    assert names(drift, "turn") == [*((str(k), 1) for k in range(1, 17)), ("24 later", 24)]
    recent = [(str(k), 1) for k in range(25, 41)]
    assert names(drift, "version") == [("24 earlier", 24), *recent]


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 5.0, 2000.0])
def test_effective_sample_size(scale):
    log_weights = np.random.default_rng(1).normal(0, scale, 500)
    size = effective_size(log_weights, "token")
    for mine, w in (
        (size.plain, log_weights),
        (size.truncated, np.minimum(log_weights, np.log(2))),
    ):
        share = np.exp(2 * logsumexp(w) - logsumexp(2 * w)) / len(w)
        assert mine == pytest.approx(share, rel=1e-9)
    if scale <= 5:
        zero, cu = torch.zeros(500, dtype=torch.float64), torch.tensor([0, 500])
        weights, cut = correction_weights(torch.from_numpy(log_weights), zero, cu, high=2.0)
        ess = (weights.sum() ** 2 / (500 * weights.square().sum())).item()
        assert size.truncated == pytest.approx(ess, rel=1e-6)
        assert size.cut == cut.double().mean().item()
    assert BOUND == LOG_RATIO_BOUND


def test_weights_of_a_drift_by_token_and_by_sample(told):
    drift, rows = told
    d = np.array([row["d"] for row in rows])
    by_sample = np.zeros(30)
    for row in rows:
        by_sample[row["sample"]] += row["d"]
    assert [size.level for size in drift.weights] == ["token", "sample"]
    for size, w in zip(drift.weights, (d, by_sample), strict=True):
        share = np.exp(2 * logsumexp(w) - logsumexp(2 * w)) / len(w)
        assert size.plain == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    ("d", "says"),
    [
        (np.zeros(100), "a correction changes little"),
        (np.r_[np.zeros(99), 5.0], "truncation mends it"),
        (np.linspace(-2, 2, 100), "a correction adds variance"),
        (np.r_[np.full(90, -10.0), np.ones(10)], "most of the batch is lost"),
    ],
)
def test_what_the_weights_suggest(d, says):
    assert says in effective_size(d, "token").suggests


def test_tokens_that_are_not_finite_are_counted_and_in_no_group():
    sample, train = one([LossSpan(2, 12)])
    train[3], train[5] = np.nan, -np.inf
    sample.rollout_logprobs[[5, 7]] = -np.inf
    drift = logprob_drift([sample], [train])
    assert (drift.tokens, drift.not_finite, drift.ok) == (10, 3, False)
    assert names(drift, "modality") == [("text only", 7)]
    assert "3 tokens without a finite logprob on both sides" in "\n".join(drift.lines())
    none = logprob_drift([sample], [np.full(10, np.nan)])
    assert none.not_finite == 10 and none.axes == {} and none.weights == ()


def test_it_is_json(told):
    drift, _ = told
    document = json.loads(json.dumps(drift.to_dict(), allow_nan=False))
    assert document["axes"]["turn"]["groups"][0]["name"] == "0"
    assert document["suggests"] == list(drift.suggests) and document["weights"][0]["high"] == 2.0
    assert max(map(len, drift.lines())) <= 120


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([LossSpan(2, 5)], "4 rollout_logprobs"),
        ([LossSpan(38, 42)], "has 40 tokens"),
        ([LossSpan(-2, 2)], "one per loss token"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, says):
    sample, train = one([LossSpan(2, 6)])
    sample.loss_spans = spans
    with pytest.raises(ArgumentError, match=says):
        logprob_drift([sample], [train])


def test_a_million_tokens_are_no_loop_over_tokens():
    samples = []
    for k in range(2000):
        sample, _ = one([LossSpan(2, 502, turn=k % 3)], 600)
        sample.sample_id = str(k)
        samples.append(sample)
    train = [np.full(500, -1.0)] * 2000
    start = time.process_time()
    drift = logprob_drift(samples, train)
    assert time.process_time() - start < 3  # seconds; a tenth of it on an idle core
    assert drift.tokens == 1_000_000 and drift.ok and drift.suggests == ()
