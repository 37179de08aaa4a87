"""Drift of logprobs: figures against mpmath, causes only from evidence."""

import dataclasses
import json
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from mmpack.errors import ArgumentError
from mmpack.parity.drift import logprob_drift
from mmpack.parity.drift_traces import trace_drift
from mmpack.schema.ragged import Ragged
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


def routed(values, logprobs=(-1.0, -2.0)):
    out = sample(list(logprobs))
    out.routed_experts = None if values is None else np.array(values, dtype=np.uint8)
    return out


SAME = [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 0]]]  # of four tokens; no logprob reads the last
OTHER = [[[0, 1]], [[3, 2]], [[4, 7]], [[1, 2]]]  # the second in another order


@pytest.mark.parametrize(
    ("rollout", "train", "off", "found"),
    [
        (SAME, SAME, 1.0, None),
        (SAME, OTHER, 1.0, "1 of 3 tokens that a logprob reads take other experts, the first in"),
        (SAME, OTHER, 1e-7, "1 of 3 tokens that a logprob reads take other experts, the first in"),
        (SAME, None, 1.0, "the rollout recorded the experts of each token, the trainer's are not"),
        (SAME, None, 1e-7, None),
        (None, SAME, 1.0, "the trainer recorded the experts of each token, the rollout did not"),
        (None, None, 1.0, None),
        (SAME, SAME[:3], 1e-7, "1 sample has routes of other layers, experts or tokens"),
    ],
)
def test_routes_that_differ_are_a_cause(rollout, train, off, found):
    given = [None if train is None else np.array(train, np.int64)]
    theirs = np.array([-1.0, -2.0 - off])
    drift = logprob_drift([routed(rollout)], [theirs], routed_experts=given)
    assert drift.causes.get("routing", "").startswith(found or "")
    assert ("routing" in drift.causes) == (found is not None)
    again, _ = trace_drift([routed(rollout)], [routed(train)], {"s": theirs})
    assert again.causes.get("routing") == drift.causes.get("routing")


def test_without_evidence_the_possible_causes_are_listed():
    drift = logprob_drift([sample([-1.0])], [np.array([-2.0])])
    assert "dtype, stale_weights" in drift.causes["unknown"]


@pytest.mark.parametrize(("argmax", "share"), [([5, 6], 0.5), ([5, None], None), (None, None)])
def test_share_of_unlike_argmax(argmax, share):
    rolled = sample([-1.0, -2.0], argmax=argmax)
    drift = logprob_drift([rolled], [np.array([-1.0, -2.0])], argmax_ids=[np.array([5, 7])])
    assert drift.argmax_differs == share


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"samples": [sample([-1.0, -2.0], kind="processed")]}, "processed"),
        ({"samples": [sample([])], "logprobs": [[]]}, "at least one"),
        ({"samples": [dataclasses.replace(sample([-1.0]), rollout_logprobs=None)]}, "let the engi"),
        ({"logprobs": [[-1.0]]}, "one per loss token"),
        ({"logprobs": [np.zeros((2, 1))]}, r"logprobs\[0\] have shape \[2, 1\], expected \[n\]"),
        ({"logprobs": [["a", "b"]]}, r"logprobs\[0\] are not numbers"),
        ({"logprobs": None}, "logprobs is None, there are 1 samples"),
        ({"argmax_ids": []}, "argmax_ids has 0 entries, there are 1 samples"),
        ({"version": 3}, "version is of type int, expected a str"),  # "3" is another name
        ({"kind": "logits"}, "kind is 'logits'"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"checksums": ({}, ["a"])}, "checksums is not a pair"),
        ({"routed_experts": [[1, 2]]}, "routed_experts"),
        ({"routed_experts": [np.zeros((4, 1, 2))]}, "routed_experts"),
        ({"kept_ids": [[[1, 2]]]}, "kept_ids"),
        ({"kept_ids": 3}, "kept_ids"),
        ({"near": 2.5}, "near is 2.5"),
    ],
)
def test_what_can_not_be_compared_is_refused(given, why):
    given = {"samples": [sample([-1.0, -2.0])], "logprobs": [np.zeros(2)]} | given
    with pytest.raises(ArgumentError, match=rf"^logprob_drift: .*{why}") as error:
        logprob_drift(given.pop("samples"), given.pop("logprobs"), **given)
    assert "Fix: " in str(error.value)


# ---- what the numbers themselves tell ------------------------------------------------------------


def scored(seed, tokens=120, vocabulary=500):
    """Log softmax [tokens, vocabulary] of made-up logits, and ids sampled from it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, vocabulary)) * 1.5
    logits[np.arange(tokens), rng.integers(0, vocabulary, tokens)] += 2 + rng.uniform(0, 14, tokens)
    probabilities = softmax(logits, axis=1)
    ids = [rng.choice(vocabulary, p=row) for row in probabilities]
    return logits, np.array(ids)


def chosen(logits, ids, temperature=1.0):
    return log_softmax(logits / temperature, axis=1)[np.arange(len(ids)), ids]


def drift_of(rolled, train, cut=50):
    """Of two samples, the second beginning at token `cut`."""
    samples = [sample(part) for part in np.split(rolled, [cut])]
    return logprob_drift(samples, np.split(train, [cut]))


NOISE = [0.0, 0.02]  # of logits: one engine in fp32, two in bf16


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("logprob_shift", lambda z, ids: np.roll(chosen(z, ids), 1)),
        ("logprob_shift", lambda z, ids: np.roll(chosen(z, ids), -1)),
        ("logprob_base", lambda z, ids: chosen(z, ids) / np.log(2)),
        ("logprob_base", lambda z, ids: chosen(z, ids) * np.log(2)),
        ("logprob_base", lambda z, ids: chosen(z, ids) / np.log(10)),
        ("logprob_base", lambda z, ids: chosen(z, ids) * np.log(10)),
        ("temperature", lambda z, ids: chosen(z, ids, 0.7)),
        ("temperature", lambda z, ids: chosen(z, ids, np.log(2))),  # ratios of bases
        ("temperature", lambda z, ids: chosen(z, ids, 1 / np.log(2))),
    ],
)
def test_one_cause_that_excludes_the_others(seed, noise, cause, change):
    logits, ids = scored(seed)
    rng = np.random.default_rng(99)
    drift = drift_of(
        chosen(logits, ids), change(logits + noise * rng.normal(size=logits.shape), ids)
    )
    assert set(drift.causes) == {cause}, drift


def test_which_base_and_which_way():
    logits, ids = scored(0)
    rolled = chosen(logits, ids)
    for change, said in (
        (rolled / np.log(2), "base 2"),
        (rolled / np.log(10), "base 10"),
        (np.roll(rolled, 1), "before it"),
        (np.roll(rolled, -1), "after it"),
    ):
        assert said in " ".join(drift_of(rolled, change).causes.values())


def other_weights(z, ids, by):
    return chosen(z + by * np.random.default_rng(7).normal(size=z.shape), ids)


def sharper(z, ids, by):
    return chosen(z + by * (z == z.max(axis=1, keepdims=True)), ids)


def trained(z, ids, by):
    z = z.copy()
    z[np.arange(len(ids)), ids] += by
    return chosen(z, ids)


def truncated(z, ids, share):
    """Renormalised over the likeliest ids that hold `share`; the sampled one is kept."""
    p = softmax(z, axis=1)
    order = np.argsort(-p, axis=1)
    held = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1)
    kept = np.zeros_like(p, bool)
    np.put_along_axis(kept, order, held - np.take_along_axis(p, order, axis=1) < share, axis=1)
    kept[np.arange(len(ids)), ids] = True
    return chosen(np.where(kept, z, -np.inf), ids)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("change", [other_weights, sharper, trained, truncated])
@pytest.mark.parametrize("by", [0.3, 0.9, 2.0])
def test_what_is_neither_is_not_named(seed, change, by):
    """Other weights (noise, entropy collapse, a step on these tokens) and top-p have causes of their own."""
    logits, ids = scored(seed)
    pair = chosen(logits, ids), change(logits, ids, by)
    for rolled, train in (pair, pair[::-1]):
        drift = drift_of(rolled, train)
        assert drift.ok or set(drift.causes) == {"unknown"}, drift
        if not drift.ok and "unknown" in drift.causes:
            assert "logprob_shift" not in drift.causes["unknown"]
            assert "dtype, stale_weights" in drift.causes["unknown"]


@pytest.mark.parametrize("tokens", [1, 4, 15])
def test_a_few_tokens_fit_anything(tokens):
    logits, ids = scored(0, tokens)
    drift = drift_of(chosen(logits, ids), chosen(logits, ids) / np.log(2), cut=1)
    assert set(drift.causes) == {"unknown"}
    for name in ("logprob_shift", "logprob_base", "temperature"):
        assert name in drift.causes["unknown"]


def test_recorded_temperatures_where_the_numbers_allow_them():
    logits, ids = scored(3, tokens=12)  # too few, where there are only numbers
    rolled, train = chosen(logits, ids, 0.7), chosen(logits, ids)
    mine = sample(rolled, kind="processed")
    mine.sampling["temperature"] = 0.7
    drift = logprob_drift([mine], [train], kind="processed", temperature=1.0)
    assert set(drift.causes) == {"temperature"} and "0.7 times" in drift.causes["temperature"]
    same = logprob_drift([mine], [train], kind="processed", temperature=0.7)
    assert set(same.causes) == {"unknown"}
    reverse = logprob_drift([mine], [train], kind="processed", temperature=0.35)
    assert set(reverse.causes) == {"unknown"}  # they would sharpen, the numbers do not
    mine.rollout_logprobs = None
    halves = sample(np.concatenate([rolled] * 2), kind="processed")
    halves.sampling["temperature"] = 0.7
    doubled = logprob_drift(
        [halves], [np.concatenate([rolled] * 2) / np.log(2)], kind="processed", temperature=1.0
    )
    assert set(doubled.causes) == {"logprob_base"}  # whatever is recorded


def filtered(count=40, ids=50, top=6):
    """A rollout that top-k cut, its lists, and logprobs of the same model over all ids and over the lists."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (count, ids))
    lists = np.sort(np.argsort(-logits, axis=1)[:, :top], axis=1)
    over_all, within = log_softmax(logits, axis=1), np.take_along_axis(logits, lists, 1)
    drawn = rng.integers(0, top, count)
    rows = np.arange(count)
    over_lists = log_softmax(within, axis=1)[rows, drawn]
    made = sample(over_lists, kind="processed")
    made.sampling |= {"top_k": top, "top_p": 1.0}
    made.kept_ids = Ragged.of(lists.tolist())
    return made, over_lists, over_all[rows, lists[rows, drawn]]


def without_lists(given, **sampling):
    return dataclasses.replace(given, kept_ids=None, sampling=given.sampling | sampling)


def test_kept_ids_of_one_side_are_a_cause():
    rolled, over_lists, over_all = filtered()
    lists = [rolled.kept_ids]
    raw = without_lists(dataclasses.replace(rolled, rollout_logprobs=np.float32(over_all)))
    raw.sampling = {"logprobs": "raw"}

    def cause(own, theirs, given):
        kind = own.sampling["logprobs"]
        drift = logprob_drift([own], [theirs], kind=kind, kept_ids=given)
        assert drift.ok or drift.causes
        return drift.causes.get("truncated_support")

    over = "the rollout's logprobs are over the ids that the sampler kept (6.0 on average), "
    assert cause(rolled, over_all, [None]) == over + "the trainer's over all"
    assert cause(rolled, over_all, None) == over + "the trainer's are not known"
    assert cause(without_lists(rolled), over_all, None).startswith("1 sample has logprobs over")
    assert cause(raw, over_lists, lists) == (
        "the trainer's logprobs are over kept ids, the rollout's are not"
    )
    fewer = [Ragged.of([x[:-1].tolist() for x in rolled.kept_ids.lists()])]
    assert cause(rolled, over_lists, fewer) == "40 of 40 lists of kept ids differ"
    assert "another number of loss tokens" in cause(rolled, over_lists, [rolled.kept_ids[:39]])
    assert cause(rolled, over_lists, lists) is None
    assert cause(rolled, over_lists - 0.1, lists) is None
    assert cause(rolled, over_lists + 0.1, None) is None  # over all ids they would fall
    assert cause(without_lists(rolled, top_k=-1), over_all, None) is None
    dump = dataclasses.replace(raw, kept_ids=rolled.kept_ids)  # raw: over all, whatever was kept
    assert cause(dump, over_all - 0.1, None) is None


def test_kept_ids_of_two_traces():
    rolled, over_lists, over_all = filtered()

    def cause(theirs, train, given=True):
        train = dataclasses.replace(train, rollout_logprobs=np.float32(theirs))
        drift, _ = trace_drift([rolled], [train], {"s": theirs} if given else None)
        return drift.causes.get("truncated_support", "")

    bare = without_lists(rolled)
    assert cause(over_all, bare).endswith("the trainer's over all")
    assert cause(over_all, bare, given=False).endswith("are not known")  # it says: filtered too
    assert not cause(over_lists + 0.1, bare, given=False)
    assert not cause(over_lists - 0.1, rolled)
    rolled = bare  # neither has lists
    assert not cause(over_lists - 0.1, bare, given=False)
    assert cause(over_all, bare).startswith("1 sample has logprobs over")


def test_lists_beside_raw_logprobs_of_two_traces_are_no_cause():
    """Both are over all ids, whatever the samplers kept."""
    made, _, over_all = filtered()
    raw = dataclasses.replace(made, rollout_logprobs=np.float32(over_all))
    raw.sampling = {"logprobs": "raw"}
    train = dataclasses.replace(raw, rollout_logprobs=np.float32(over_all - 0.1))
    drift, _ = trace_drift([raw], [train])
    assert not drift.ok and "truncated_support" not in drift.causes
    assert "truncated_support" not in drift.causes["unknown"]


@pytest.mark.parametrize(("kind", "lists"), [("raw", False), ("processed", True)])
def test_equal_ids_rule_kept_ids_out(kind, lists):
    rolled, over_lists, _ = filtered()
    rolled.sampling["logprobs"] = kind
    given = [rolled.kept_ids] if lists else None
    own = rolled if lists else without_lists(rolled)
    drift = logprob_drift([own], [over_lists - 0.1], kind=kind, kept_ids=given)
    assert "routing" in drift.causes["unknown"]
    assert "truncated_support" not in drift.causes["unknown"]
