"""The drift of two traces: from files of each format as in memory, of all samples, and why some are left out."""

from dataclasses import replace

import numpy as np
import pytest
from support.drifts import planted, rollouts

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.parity.drift import logprob_drift
from mmpack.parity.drift_traces import CARRIED, NOT_GIVEN, trace_drift


@pytest.fixture(scope="module")
def sides():
    rng = np.random.default_rng(0)
    left = rollouts(rng, 40)
    train = planted(rng, left, "turns", 30, 1e-4)
    right = [
        replace(s, rollout_logprobs=x.astype(np.float32)) for s, x in zip(left, train, strict=True)
    ]
    return left, right


def of_train(right):
    return [s.rollout_logprobs.astype(np.float64) for s in right]


@pytest.mark.parametrize("kind", ["parquet", "memory", "generator"])
def test_all_samples_of_a_trace(sides, kind, tmp_path):
    left, right = sides
    expected = logprob_drift(left, of_train(right))
    given = left, right[::-1]
    if kind == "generator":
        given = (s for s in left), (s for s in right)
    elif kind != "memory":
        given = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
        for path, side in zip(given, (left, right), strict=True):
            mp.write_trace(path, side)
    drift, left_out = trace_drift(*given)
    assert left_out == {} and drift.tokens == expected.tokens
    if kind == "memory":  # pairs come as both have come: sums have another order
        assert drift.suggests == expected.suggests and drift.max_abs == expected.max_abs
    else:
        assert drift == expected
    assert "from turn 1 on" in drift.suggests[0]


def test_logprobs_beside_the_traces(sides):
    left, right = sides
    train = {s.sample_id: s.rollout_logprobs for s in right}
    bare = [replace(s, rollout_logprobs=None) for s in left]
    assert trace_drift(left, bare) == (None, {})
    drift, left_out = trace_drift(left, bare, train)
    assert drift == logprob_drift(left, of_train(right)) and left_out == {}
    for wrong in ([["a"]], [[1.0]] * 2, object()):
        with pytest.raises(ArgumentError, match=r"logprobs\['s0'\]"):
            trace_drift(left, bare, {"s0": wrong})
    with pytest.raises(
        ArgumentError, match=r"train_logprobs is of type list, .* Fix: pass \{sample_id"
    ):
        trace_drift(left, bare, of_train(right))


def test_what_is_left_out(sides):
    left, right = list(sides[0]), list(sides[1])
    right[0] = replace(right[0], input_ids=right[0].input_ids + 1)
    right[1] = replace(right[1], sampling={"logprobs": "processed"})
    right[2] = replace(right[2], rollout_logprobs=right[2].rollout_logprobs[1:])
    right[3] = replace(right[3], rollout_logprobs=None)
    right[4] = replace(
        right[4], rollout_logprobs=left[4].rollout_logprobs
    )  # bit-equal: no drift there
    drift, left_out = trace_drift(left, right[:-1])
    reasons = ("logprobs of other ids", "logprobs of unlike kinds", "logprobs of other tokens")
    assert left_out == dict.fromkeys(reasons, 1)
    assert drift == logprob_drift(left[4:-1], of_train(right[4:-1]))


def test_a_trace_that_carries_the_rollout_s_own(sides):
    left, right = sides
    assert trace_drift(left, [replace(s) for s in left]) == (None, {CARRIED: 40})
    own = {s.sample_id: s.rollout_logprobs for s in left}
    drift, _ = trace_drift(left, left, own)  # a trainer that is bit-equal
    assert drift.ok and drift.max_abs == 0
    assert trace_drift(left, left, {"x": [1.0]}) == (None, {NOT_GIVEN: 40})  # under other names
    some = {s.sample_id: s.rollout_logprobs for s in right[:10]}
    drift, left_out = trace_drift(left, left, some)
    assert drift == logprob_drift(left[:10], of_train(right[:10])) and left_out == {NOT_GIVEN: 30}
