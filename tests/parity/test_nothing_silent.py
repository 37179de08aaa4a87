"""Each field of a sample, changed by itself, is a finding, or is listed as not compared: never nothing."""

import copy
import dataclasses

import numpy as np
import pytest
from support.planting.episodes import episode, other
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack import compare
from mmpack.parity.records import RECORDS


def changed(value):
    """Another value of the same type."""
    match value:
        case np.ndarray():
            return value + np.ones_like(value)
        case mp.Ragged():
            return mp.Ragged(value.offsets, value.ids + np.int32(1), value.logprobs)
        case dict() if all(isinstance(lists, mp.Ragged) for lists in value.values()) and value:
            return {name: changed(lists) for name, lists in value.items()}
        case bool() | str():
            return f"{value}x" if isinstance(value, str) else not value
        case int() | float():
            return value + 1
        case list() | tuple():
            return type(value)([changed(value[0]), *value[1:]]) if value else value
        case dict():
            return value | {"added": 1}
    record = copy.copy(value)
    for name in ("version", "source", "label", "action", "value", "codec"):
        if getattr(record, name, None) is not None:
            setattr(record, name, changed(getattr(record, name)))
            return record
    raise AssertionError(value)


def compared(left, right):
    """Fields of the findings, and what is listed as not compared of the changed side and not of an equal one."""
    before = compare([left], [copy.deepcopy(left)]).not_compared
    report = compare([left], [right])
    listed = {name for name, why in report.not_compared.items() if before.get(name) != why}
    return {finding.field for finding in report.findings}, listed


def both_ways(tmp_path, left, right):
    """The reports of samples, and of two Parquet traces."""
    paths = [tmp_path / "left.parquet", tmp_path / "right.parquet"]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    pair = [list(mp.read_trace(path)) for path in paths]
    fast, slow = compare(*paths), compare(*pair)
    assert fast.to_json() == slow.to_json()
    return slow


FIELDS = [f.name for f in dataclasses.fields(mp.Sample) if f.name not in ("sample_id", "family")]
OF_MEDIA = [name for name in mp.Medium.columns() if name != "modality"]


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "schema_version"])
def test_any_field_of_a_sample(name):
    left = full_sample()
    if name == "codec_ids":
        left.codec_ids = [mp.CodecIds("codec", np.array([[1, 2]], np.int32), (8,), 12.5)]
    value = getattr(left, name)
    if name == "modality_spans":
        value = [dataclasses.replace(s, frame=7) for s in value]
    elif name == "attention_mask":
        value = np.where(np.arange(len(left)) == 4, 0, value).astype(np.int8)
    elif name in ("media", "loss_spans"):
        value = value[:-1]
    else:
        value = changed(value)
    findings, listed = compared(left, other(left, **{name: value}))
    assert name in findings | {n.partition(".")[0] for n in listed}
    if getattr(left, name) is not None and name in RECORDS:
        assert name in findings
        findings, listed = compared(left, other(left, **{name: "" if name == "group_id" else None}))
        assert name in listed  # boxes without a coordinate system also break a rule


@pytest.mark.parametrize("name", OF_MEDIA)
@pytest.mark.parametrize("place", [0, 1])
def test_any_field_of_a_medium(name, place):
    left, right = full_sample(), full_sample()
    value = getattr(left.media[place], name)
    if value is None:
        return
    setattr(right.media[place], name, changed(value))
    findings, listed = compared(left, right)
    assert "media" in findings or f"media.{name}" in listed


def small(**fields):
    sample = make_sample([("text", (1, 2, 3)), ("response", (5, 6, 7, 8), 0)], sample_id="s")
    return other(sample, **fields)


SCORES = [mp.Score("exact", 0.1), mp.Score("format", 1.0, {"turn": 0})]


@pytest.mark.parametrize(
    ("field", "left", "right"),
    [
        ("group_id", "g0", "g1"),
        ("rewards", SCORES, SCORES[:1]),
        ("rewards", SCORES, [SCORES[0], mp.Score("format", 0.5, {"turn": 0})]),
        ("rewards", SCORES, [SCORES[0], mp.Score("format", 1.0)]),
        ("observation_spans", [mp.ObservationSpan(0, 2, "tool")], []),
        (
            "observation_spans",
            [mp.ObservationSpan(0, 2, "tool")],
            [mp.ObservationSpan(0, 3, "tool")],
        ),
        (
            "observation_spans",
            [mp.ObservationSpan(0, 2, "tool", 0)],
            [mp.ObservationSpan(0, 2, "tool", 1)],
        ),
        ("policy_versions", [mp.PolicyVersion(3, 7, "1")], [mp.PolicyVersion(3, 7, "2")]),
        (
            "policy_versions",
            [mp.PolicyVersion(3, 7, "1")],
            [mp.PolicyVersion(3, 6, "1"), mp.PolicyVersion(6, 7, "2")],
        ),
        ("finish_reason", "stop", "length"),
        ("turn", 0, 1),
    ],
)
def test_what_is_compared_beside_the_layout(tmp_path, field, left, right):
    report = both_ways(tmp_path, small(**{field: left}), small(**{field: right}))
    assert not report.ok and [f.field for f in report.findings] == [field]
    assert report.first.cause == "unknown" and report.first.fix == RECORDS[field]
    assert both_ways(tmp_path, small(**{field: left}), small(**{field: left})).ok


@pytest.mark.parametrize(
    ("field", "left", "right"),
    [
        ("rewards", SCORES, SCORES[::-1]),
        ("rewards", SCORES, [mp.Score("exact", float(np.float32(0.1))), SCORES[1]]),
        ("policy_versions", [mp.PolicyVersion(0, 7, "1")], [mp.PolicyVersion(3, 7, "1")]),
        (
            "policy_versions",
            [mp.PolicyVersion(3, 5, "1"), mp.PolicyVersion(5, 7, "1")],
            [mp.PolicyVersion(3, 7, "1")],
        ),
        (
            "observation_spans",
            [mp.ObservationSpan(0, 1, "tool"), mp.ObservationSpan(1, 3, "tool")],
            [mp.ObservationSpan(0, 3, "tool")],
        ),
    ],
)
def test_what_means_the_same_beside_the_layout(tmp_path, field, left, right):
    assert both_ways(tmp_path, small(**{field: left}), small(**{field: right})).findings == []


def test_a_version_that_one_side_knows_of_some_tokens(tmp_path):
    left, right = [mp.PolicyVersion(3, 7, "1")], [mp.PolicyVersion(3, 6, "1")]
    report = both_ways(tmp_path, small(policy_versions=left), small(policy_versions=right))
    assert report.ok
    assert report.not_compared["policy_versions"] == "train has no policy_versions (1 of 1 samples)"


def test_a_turn_that_one_side_alone_recorded(tmp_path):
    left, right = small(), small(loss_spans=[mp.LossSpan(3, 7)])
    for pair, side in (((left, right), "train"), ((right, left), "rollout")):
        report = both_ways(tmp_path, *pair)
        assert report.not_compared["loss_spans.turn"].startswith(f"{side} has no loss_spans.turn")


def test_what_neither_side_has_is_listed_where_it_is_required():
    assert "rewards" not in compare([small()], [small()]).not_compared
    report = compare([small()], [small()], require=("rewards",))
    assert not report.ok
    assert report.not_compared["rewards"] == "neither side has rewards (1 of 1 samples)"


def test_spans_of_other_ids_are_not_compared():
    right = episode(system=(11, 12), response=(700, 703))
    report = compare([episode()], [right])
    assert "observation_spans" not in {f.field for f in report.findings}
    why = "not compared where ids differ (1 of 1 samples)"
    assert report.not_compared["observation_spans"] == why
    assert not compare([episode()], [right], require=("observation_spans",)).ok


def scored(**sampling):
    return small(rollout_logprobs=np.full(4, -1.0, np.float32), sampling=sampling)


# that an engine takes from generation_config.json where a request says nothing
ON = {
    "temperature": (0.7, 1.0),
    "top_p": (0.9, None),
    "top_k": (20, None),
    "min_p": (0.1, 0),
    "repetition_penalty": (1.05, 1),
    "presence_penalty": (1.5, 0.5),
    "bad_words": (["no"], []),
    "logit_bias": ({"5": -1.0}, {"5": -2.0}),
    "allowed_token_ids": ([5], None),
    "min_tokens": (3, 4),
}


@pytest.mark.parametrize("name", ON)
def test_settings_that_change_processed_logprobs(tmp_path, name):
    on, unlike = ON[name]
    left = scored(logprobs="processed", **{name: on})
    report = both_ways(tmp_path, left, scored(logprobs="processed", **{name: unlike}))
    assert not report.ok and report.causes == {"sampling": 1} and name in report.first.evidence
    report = both_ways(tmp_path, left, scored(logprobs="processed"))  # absent is not off
    assert not report.ok and report.causes == {"sampling": 1}
    assert f"{name} not recorded in train" in report.first.evidence
    assert "generation_config.json" in report.first.evidence
    raw = [scored(logprobs="raw", **fields) for fields in ({name: on}, {name: unlike}, {})]
    assert mp.compare(raw[:1], raw[1:2]).ok and mp.compare(raw[:1], raw[2:]).ok


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "repetition_penalty"])
def test_a_setting_that_is_off_against_an_absent_one_is_listed(tmp_path, name):
    """It may be equal, and it may not: no finding, and not called equal."""
    off = {"top_k": -1}.get(name, 1.0)
    pair = scored(logprobs="processed", **{name: off}), scored(logprobs="processed")
    report = both_ways(tmp_path, *pair)
    assert report.ok and report.not_compared[f"sampling.{name}"].startswith("train has no ")
    assert not compare([pair[0]], [pair[1]], require=("sampling",)).ok


def test_settings_of_logprobs_whose_kind_is_not_known(tmp_path):
    one, two, none = scored(temperature=0.7), scored(temperature=1.0), scored(top_p=1.0)
    report = both_ways(tmp_path, one, two)
    assert report.causes == {"unknown": 1} and "possible: sampling" in report.first.evidence
    report = both_ways(tmp_path, one, none)  # raw logprobs would not depend on it
    assert report.ok and "neither side has" in report.not_compared["sampling.logprobs"]
    assert both_ways(tmp_path, one, scored(temperature=1.0, logprobs="raw")).ok


def test_settings_that_parity_does_not_read(tmp_path):
    pair = [scored(logprobs="processed", dry_multiplier=value) for value in (0.5, 0.8)]
    report = both_ways(tmp_path, *pair)
    assert report.ok and "not known" in report.not_compared["sampling.dry_multiplier"]
    assert not compare(*([s] for s in pair), require=("sampling",)).ok
    raw = [scored(logprobs="raw", temperature=value) for value in (0.5, 0.8)]
    report = both_ways(tmp_path, *raw)
    assert report.ok and "do not depend" in report.not_compared["sampling.temperature"]


def test_parts_are_counted_once_a_sample():
    """One sample with more settings than are listed."""
    left, right = small(), small()
    left.processor = {"image": {f"a{i:06d}": i for i in range(2000)}}
    right.processor = {"image": {}}
    report = compare([left], [right])
    assert report.not_compared["processor"] == "train has no processor (1 of 1 samples)"
    assert not compare([left], [right], require=("processor",)).ok
