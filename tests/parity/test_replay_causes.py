"""truncated_support and routing: named where kept ids or routes of the two sides differ, of files as of samples."""

import copy

import numpy as np
import pytest
from support.samples import full_sample, kept_of, make_sample, routes_of, teacher_of

import mmpack as mp
from mmpack.parity.records import RECORDS


def sides():
    left = make_sample([("text", [1, 2, 3, 4]), ("response", [5, 6, 7, 8], 0)])
    rng = np.random.default_rng(0)
    left.kept_ids, left.routed_experts = kept_of(left, rng), routes_of(left, rng)
    left.teachers = {"t": teacher_of(left, rng)}
    left.sampling = {"top_p": 0.8, "top_k": 1024, "logprobs": "processed", "temperature": 1.0}
    left.rollout_logprobs = -np.ones(4, np.float32)
    return left, copy.deepcopy(left)


def reports(tmp_path, left, right):
    """Of samples, and of two Parquet traces: they must be one."""
    paths = [tmp_path / "left.parquet", tmp_path / "right.parquet"]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    slow, fast = mp.compare([left], [right]), mp.compare(*paths)
    assert slow.to_json() == fast.to_json()
    return slow


def causes(report):
    return [finding.cause for finding in report.findings]


def test_equal_sides_are_equal(tmp_path):
    report = reports(tmp_path, *sides())
    assert report.ok and not {"kept_ids", "routed_experts", "teachers"} & report.not_compared.keys()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("name", "cause"), [("kept_ids", "truncated_support"), ("routed_experts", "routing")]
)
def test_only_one_side_has_it(tmp_path, side, name, cause):
    pair = sides()
    setattr(pair[side], name, None)
    report = reports(tmp_path, *pair)
    assert causes(report) == [cause] and not report.ok
    first = report.first
    assert first.field == name and f"no {name}" in (first.left, first.right)[side]
    assert name in report.not_compared
    if name == "kept_ids":
        assert "(top_p 0.8, top_k 1024)" in first.evidence and "support=" in first.fix


def test_neither_side_has_it_is_no_news(tmp_path):
    left, right = sides()
    for sample in (left, right):
        sample.kept_ids = sample.routed_experts = sample.teachers = None
    report = reports(tmp_path, left, right)
    assert report.ok and "kept_ids" not in report.not_compared
    required = mp.compare([left], [right], require=("kept_ids",))
    assert not required.ok and "kept_ids" in required.not_compared


def test_another_list(tmp_path):
    left, right = sides()
    lists = [row.tolist() for row in left.kept_ids.lists()]
    lists[2].append(99)
    right.kept_ids = mp.Ragged.of(lists)
    first = reports(tmp_path, left, right).first
    assert (first.cause, first.index, first.span) == ("truncated_support", 6, (6, 7))
    assert first.evidence == "1 of 4 lists of kept ids differ"


def test_another_expert(tmp_path):
    left, right = sides()
    right.routed_experts[3, 1] = (left.routed_experts[3, 1] + 2) % 8
    first = reports(tmp_path, left, right).first
    assert (first.cause, first.index, first.span) == ("routing", 3, (3, 4))
    assert (
        first.evidence
        == "1 of 7 tokens that a logprob reads take other experts, the first in layer 1"
    )


def test_routes_of_another_model(tmp_path):
    left, right = sides()
    right.routed_experts = routes_of(right, np.random.default_rng(0), 3, 2)
    report = reports(tmp_path, left, right)
    assert causes(report) == ["routing"] and "another number of layers" in report.first.evidence


@pytest.mark.parametrize("same", ["order", "last"])
def test_the_same_experts(tmp_path, same):
    left, right = sides()
    if same == "order":  # the same k experts
        right.routed_experts = np.ascontiguousarray(right.routed_experts[..., ::-1])
    else:  # no logprob reads the last token
        right.routed_experts[-1] = 0
    assert reports(tmp_path, left, right).ok


@pytest.mark.parametrize("name", ["kept_ids", "routed_experts", "teachers"])
def test_other_ids_move_them(tmp_path, name):
    left, right = sides()
    other = sides()[1]
    for field in ("kept_ids", "routed_experts", "teachers"):
        if field != name:
            setattr(left, field, None)
            setattr(other, field, None)
    right = make_sample([("text", [1, 2, 3, 4, 9]), ("response", [5, 6, 7, 8], 0)])
    right.sampling, right.rollout_logprobs = left.sampling, left.rollout_logprobs
    rng = np.random.default_rng(1)
    makers = {
        "kept_ids": kept_of,
        "routed_experts": routes_of,
        "teachers": lambda s, r: {"t": teacher_of(s, r)},
    }
    setattr(right, name, makers[name](right, rng))
    report = reports(tmp_path, left, right)
    assert {"truncated_support", "routing"}.isdisjoint(causes(report)) and not report.ok
    assert "not compared where ids differ" in report.not_compared[name]


def test_teachers(tmp_path):
    left, right = sides()
    right.teachers = {"t": teacher_of(right, np.random.default_rng(5))}
    first = reports(tmp_path, left, right).first
    assert (first.field, first.cause, first.fix) == ("teachers", "unknown", RECORDS["teachers"])
    right.teachers = {**left.teachers, "u": left.teachers["t"]}
    assert reports(tmp_path, left, right).first.field == "teachers"
    right.teachers = None
    report = reports(tmp_path, left, right)
    assert report.ok and "train" in report.not_compared["teachers"]
    lists = left.teachers["t"]  # as after six digits
    near = (lists.logprobs * (1 + 1e-6)).astype(np.float32)
    right.teachers = {"t": mp.Ragged(lists.offsets, lists.ids, near)}
    assert reports(tmp_path, left, right).ok


def test_a_broken_rule_of_one_side_is_a_finding():
    left, right = sides()
    for sample in (left, right):
        sample.kept_ids = mp.Ragged.of([[1], [6], [7], [8]])
    report = mp.compare([left], [right])
    assert "MM333 in both sides" in report.first.evidence
    findings = mp.compare([sides()[0]], [right]).findings
    assert [f.cause for f in findings] == ["truncated_support", "unknown"]
    assert "MM333 in train" in findings[1].evidence


def test_a_version_is_no_difference(tmp_path):
    left, right = (make_sample([("text", [1]), ("response", [2], 0)]) for _ in range(2))
    right.schema_version = "1"
    assert reports(tmp_path, left, right).ok


def test_full_samples_are_equal(tmp_path):
    assert reports(tmp_path, full_sample(), full_sample()).ok
