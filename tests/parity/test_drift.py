"""Drift of logprobs: figures against mpmath, causes from evidence alone."""

import json
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.parity.drift import logprob_drift
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, PolicyVersion


def sample(logprobs, *, dtype=None, version=None, argmax=None, kind="raw"):
    n = len(logprobs)
    return Sample(
        sample_id="s",
        group_id="s",
        family="qwen2_5_vl",
        input_ids=np.arange(n + 2),
        media=[],
        modality_spans=[],
        loss_spans=[LossSpan(2, n + 2)],
        rollout_logprobs=np.asarray(logprobs, dtype=np.float32),
        sampling={"logprobs": kind},
        policy_versions=None if version is None else [PolicyVersion(2, n + 2, version)],
        metadata={"argmax_ids": argmax, "engine": {} if dtype is None else {"dtype": dtype}},
    )


LOGPROB = st.floats(-20, 0, width=32)


@given(st.lists(st.tuples(LOGPROB, st.floats(-2, 2, width=32)), min_size=1, max_size=20))
@settings(deadline=None)
def test_figures(pairs):
    rolled = np.array([a for a, _ in pairs], dtype=np.float32)
    train = rolled + np.array([d for _, d in pairs], dtype=np.float32)
    drift = logprob_drift([sample(rolled)], [train])
    with mpmath.workdps(40):
        d = [
            mpmath.mpf(float(b)) - mpmath.mpf(float(a)) for a, b in zip(rolled, train, strict=True)
        ]
        k3 = mpmath.fsum(mpmath.exp(x) - 1 - x for x in d) / len(d)
        mean = mpmath.fsum(abs(x) for x in d) / len(d)
    assert drift.tokens == len(d)
    assert drift.max_abs == float(max(abs(x) for x in d))
    assert math.isclose(drift.mean_abs, float(mean), rel_tol=1e-12, abs_tol=1e-300)
    assert math.isclose(drift.k3, float(k3), rel_tol=1e-6, abs_tol=1e-15)


@pytest.mark.parametrize(
    ("off", "fine"),
    [
        ([0.0] * 100, True),
        ([9e-4] + [0.0] * 99, True),
        ([1.1e-3] + [0.0] * 999, False),  # the largest
        ([2e-5] * 100, False),  # the mean
        ([float("nan")] + [0.0] * 99, False),
    ],
)
def test_the_bound_is_that_of_two_engines(off, fine):
    rolled = np.zeros(len(off), dtype=np.float32)
    drift = logprob_drift([sample(rolled)], [np.array(off)])
    assert drift.ok == fine and (set(drift.causes) == (set() if fine else {"unknown"}))


def test_evidence_names_dtype_and_stale_weights_both():
    rolled = sample([-1.0, -2.0], dtype="bfloat16", version="3")
    checksums = ({"a": "1", "b": "2"}, {"a": "1", "b": "0"})
    drift = logprob_drift(
        [rolled], [np.array([-1.1, -2.0])], dtype="float32", version="4", checksums=checksums
    )
    assert set(drift.causes) == {"dtype", "stale_weights"}
    assert "bfloat16" in drift.causes["dtype"]
    assert "1 of 2 tensors differ: b" in drift.causes["stale_weights"]
    assert "by weights 3" in drift.causes["stale_weights"]
    json.dumps(drift.to_dict(), allow_nan=False)


def test_without_evidence_the_possible_causes_are_listed():
    drift = logprob_drift([sample([-1.0])], [np.array([-2.0])])
    assert "dtype, stale_weights" in drift.causes["unknown"]


@pytest.mark.parametrize(("argmax", "share"), [([5, 6], 0.5), ([5, None], None), (None, None)])
def test_share_of_unlike_argmax(argmax, share):
    rolled = sample([-1.0, -2.0], argmax=argmax)
    drift = logprob_drift([rolled], [np.array([-1.0, -2.0])], argmax_ids=[np.array([5, 7])])
    assert drift.argmax_differs == share


@pytest.mark.parametrize(
    ("rolled", "train", "why"),
    [
        (sample([-1.0], kind="processed"), [-1.0], "processed"),
        (sample([-1.0]), [-1.0, -2.0], "one for each"),
        (sample([]), [], "one at least"),
    ],
)
def test_what_can_not_be_compared_is_refused(rolled, train, why):
    with pytest.raises(ArgumentError, match=why):
        logprob_drift([rolled], [np.array(train)])


def test_a_rollout_without_logprobs_is_refused():
    rolled = sample([-1.0])
    rolled.rollout_logprobs = None
    with pytest.raises(ArgumentError, match="ask the engine"):
        logprob_drift([rolled], [np.array([-1.0])])
