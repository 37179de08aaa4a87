"""Each field of a sample, changed by itself, is a finding, or is listed as not compared: never nothing."""

import copy
import dataclasses

import numpy as np
import pytest
from support.planting.episodes import episode, other
from support.planting.said import check
from support.samples import full_sample, kept_of, make_sample, routes_of, teacher_of

import mmpack as mp
from mmpack import compare
from mmpack.layout.fingerprint import fingerprint
from mmpack.parity.records import RECORDS


def changed(value):
    """Another value of the same type."""
    match value:
        case np.ndarray():
            return value + np.ones_like(value)
        case mp.schema.Ragged():
            return mp.schema.Ragged(value.offsets, value.ids + np.int32(1), value.logprobs)
        case dict() if (
            all(isinstance(lists, mp.schema.Ragged) for lists in value.values()) and value
        ):
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
    """The report of samples; that of two Parquet traces, which are read side by side, must be the same."""
    paths = [tmp_path / "left.parquet", tmp_path / "right.parquet"]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    slow = compare(*(list(mp.read_trace(path)) for path in paths))
    assert compare(*paths).to_json() == slow.to_json()
    return slow


FIELDS = [f.name for f in dataclasses.fields(mp.Sample) if f.name not in ("sample_id", "family")]
OF_MEDIA = [name for name in mp.Medium.columns() if name != "modality"]


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "schema_version"])
def test_any_field_of_a_sample(name):
    left = full_sample()
    if name == "codec_ids":
        left.codec_ids = [mp.schema.CodecIds("codec", np.array([[1, 2]], np.int32), (8,), 12.5)]
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
def test_any_field_of_a_medium(name):
    for place in (0, 1):
        left, right = full_sample(), full_sample()
        value = getattr(left.media[place], name)
        if value is not None:
            setattr(right.media[place], name, changed(value))
            findings, listed = compared(left, right)
            assert "media" in findings or f"media.{name}" in listed


def small(**fields):
    sample = make_sample([("text", (1, 2, 3)), ("response", (5, 6, 7, 8), 0)], sample_id="s")
    return other(sample, **fields)


SCORES = [mp.Score("exact", 0.1), mp.Score("format", 1.0, {"turn": 0})]
SEEN = [mp.schema.ObservationSpan(0, 2, "tool", 0)]
V = mp.schema.PolicyVersion


@pytest.mark.parametrize(
    ("field", "left", "right", "same"),
    [
        ("group_id", "g0", "g1", False),
        ("rewards", SCORES, SCORES[:1], False),
        ("rewards", SCORES, [SCORES[0], mp.Score("format", 0.5, {"turn": 0})], False),
        ("rewards", SCORES, [SCORES[0], mp.Score("format", 1.0)], False),
        ("observation_spans", SEEN, [], False),
        ("observation_spans", SEEN, [mp.schema.ObservationSpan(0, 3, "tool", 0)], False),
        ("observation_spans", SEEN, [mp.schema.ObservationSpan(0, 2, "tool", 1)], False),
        ("policy_versions", [V(3, 7, "1")], [V(3, 7, "2")], False),
        ("policy_versions", [V(3, 7, "1")], [V(3, 6, "1"), V(6, 7, "2")], False),
        ("finish_reason", "stop", "length", False),
        ("turn", 0, 1, False),
        ("rewards", SCORES, SCORES[::-1], True),
        ("rewards", SCORES, [mp.Score("exact", float(np.float32(0.1))), SCORES[1]], True),
        ("policy_versions", [V(0, 7, "1")], [V(3, 7, "1")], True),
        ("policy_versions", [V(3, 5, "1"), V(5, 7, "1")], [V(3, 7, "1")], True),
        (
            "observation_spans",
            [
                mp.schema.ObservationSpan(0, 1, "tool", 0),
                mp.schema.ObservationSpan(1, 2, "tool", 0),
            ],
            SEEN,
            True,
        ),
    ],
)
def test_what_is_compared_beside_the_layout(tmp_path, field, left, right, same):
    report = both_ways(tmp_path, small(**{field: left}), small(**{field: right}))
    assert [f.field for f in report.findings] == ([] if same else [field])
    if not same:
        assert report.first.cause == "unknown" and report.first.fix == RECORDS[field]


# six loss tokens [3, 9); the first span that differs
@pytest.mark.parametrize(
    ("left", "right", "span"),
    [
        ([(3, 5, 0), (5, 9, 1)], [(3, 9, 0)], (5, 9)),
        ([(3, 5, 0), (5, 9, 1)], [(3, 6, 0), (6, 9, 1)], (5, 6)),
        ([(3, 5, None), (5, 9, 1)], [(3, 7, 1), (7, 9, 2)], (7, 9)),
        ([(3, 9, 0)], [(3, 9, 1)], (3, 9)),
        ([(3, 5, 0), (5, 9, 0)], [(3, 9, 0)], None),
        ([(3, 5, 0), (5, 9, None)], [(3, 9, 0)], None),
        ([(3, 5, 0), (5, 5, 7), (5, 9, 1)], [(3, 5, 0), (5, 9, 1)], None),
        ([(3, 5, 0), (5, 9, 1)], [(3, 9, None)], None),
    ],
)
def test_turns_of_tokens(left, right, span):
    sides = []
    for given in (left, right):
        sample = make_sample([("text", (1, 2, 3)), ("response", range(5, 11))])
        sides.append(other(sample, loss_spans=[mp.LossSpan(a, b, turn=t) for a, b, t in given]))
    for pair in (sides, sides[::-1]):
        first = compare(pair[:1], pair[1:]).first
        assert (first and (first.field, first.span)) == (span and ("loss_spans", span))


def test_what_one_side_knows_of_some_tokens(tmp_path):
    report = both_ways(
        tmp_path, small(policy_versions=[V(3, 7, "1")]), small(policy_versions=[V(3, 6, "1")])
    )
    assert report.ok
    assert report.not_compared["policy_versions"] == "train has no policy_versions (1 of 1 samples)"
    left, right = small(), small(loss_spans=[mp.LossSpan(3, 7)])
    for pair, side in (((left, right), "train"), ((right, left), "rollout")):
        report = both_ways(tmp_path, *pair)
        assert report.not_compared["loss_spans.turn"].startswith(f"{side} has no loss_spans.turn")


def test_spans_of_other_ids_are_not_compared():
    right = episode(system=(11, 12), response=(700, 703))
    report = compare([episode()], [right], require=("observation_spans",))
    assert not report.ok and "observation_spans" not in {f.field for f in report.findings}
    why = "not compared where ids differ (1 of 1 samples)"
    assert report.not_compared["observation_spans"] == why


def test_unlike_fingerprints():
    settings = {"image": {"max_pixels": 100}}
    marked = small(processor=settings, processor_fingerprint=fingerprint(settings))
    odd = other(marked, processor_fingerprint="sha256:" + "0" * 64)
    assert check(marked, odd, "unknown").first.field == "processor_fingerprint"
    check(marked, other(odd, processor_fingerprint=None))
    for like in ({"image": {"max_pixels": 100.0}}, settings | {"position_rule": "max"}):
        right = other(marked, processor=like, processor_fingerprint=fingerprint(like))
        assert right.processor_fingerprint != marked.processor_fingerprint
        check(marked, right)  # the settings tell why


def test_parts_are_counted_once_a_sample():
    """One sample with more settings than are listed."""
    left, right = small(), small()
    left.processor = {"image": {f"a{i:06d}": i for i in range(2000)}}
    right.processor = {"image": {}}
    report = compare([left], [right], require=("processor",))
    assert report.not_compared["processor"] == "train has no processor (1 of 1 samples)"
    assert not report.ok


# ---- samplers --------------------------------------------------------------------------------------


def scored(**sampling):
    return small(rollout_logprobs=np.full(4, -1.0, np.float32), sampling=sampling or None)


# a value that is on, that an engine takes from generation_config.json where a request says nothing; one that differs;
# those that leave logprobs as they are
SAMPLERS = {
    "temperature": (0.7, 1.0, ()),
    "top_p": (0.9, None, (1, 1.0, None)),
    "top_k": (20, None, (0, -1, None)),
    "min_p": (0.1, 0, (0, 0.0, None)),
    "repetition_penalty": (1.05, 1, (1, 1.0, None)),
    "presence_penalty": (1.5, 0.5, (0, 0.0, None)),
    "bad_words": (["no"], [], ([], None)),
    "logit_bias": ({"5": -1.0}, {"5": -2.0}, ({}, None)),
    "allowed_token_ids": ([5], None, (None,)),
    "min_tokens": (3, 4, (0, None)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_settings_that_change_processed_logprobs(tmp_path, name):
    on, unlike, off = SAMPLERS[name]
    left = scored(logprobs="processed", **{name: on})
    report = both_ways(tmp_path, left, scored(logprobs="processed", **{name: unlike}))
    assert not report.ok and report.causes == {"sampling": 1} and name in report.first.evidence
    absent = check(left, scored(logprobs="processed"), "sampling", "generation_config.json")
    assert f"{name} not recorded in train" in absent.first.evidence  # absent is not off
    check(left, other(left), require=("sampling",))
    raw = [scored(logprobs="raw", **fields) for fields in ({name: on}, {name: unlike}, {})]
    check(raw[0], raw[1])
    check(raw[0], raw[2])
    for a in off:
        check(left, scored(logprobs="processed", **{name: a}), "sampling")
        for b in off:
            pair = (scored(logprobs="processed", **{name: x}) for x in (a, b))
            check(*pair, require=("sampling",))


def test_settings_that_may_be_equal_are_listed(tmp_path):
    for name, off in (("temperature", 1.0), ("top_k", -1), ("repetition_penalty", 1.0)):
        pair = scored(logprobs="processed", **{name: off}), scored(logprobs="processed")
        report = both_ways(tmp_path, *pair)
        assert report.ok and report.not_compared[f"sampling.{name}"].startswith("train has no ")
        assert not compare([pair[0]], [pair[1]], require=("sampling",)).ok
    null = scored(logprobs="processed", temperature=None)  # was not recorded
    listed = compare([null], [scored(logprobs="processed", temperature=1.0)]).not_compared
    assert "sampling.temperature" in listed
    assert not compare([null], [scored(logprobs="processed", temperature=0.7)]).ok
    near = (scored(logprobs="processed", temperature=t) for t in (0.7, float(np.float32(0.7))))
    assert "sampling.temperature" not in check(*near).not_compared
    bias = (scored(logprobs="processed", logit_bias=b) for b in ({5: -1.0}, {"5": -1.0}))
    check(*bias, require=("sampling",))
    unread = [scored(logprobs="processed", dry_multiplier=value) for value in (0.5, 0.8)]
    report = compare(unread[:1], unread[1:], require=("sampling",))
    assert not report.ok and "not known" in report.not_compared["sampling.dry_multiplier"]
    raw = (scored(logprobs="raw", temperature=value) for value in (0.5, 0.8))
    assert "do not depend" in check(*raw).not_compared["sampling.temperature"]


def test_logprobs_whose_kind_is_not_one_or_not_known(tmp_path):
    raw, processed = scored(logprobs="raw"), scored(logprobs="processed")
    assert check(raw, processed, "logprob_kind").first.field == "sampling"
    one, two, none = scored(temperature=0.7), scored(temperature=1.0), scored(top_p=1.0)
    check(one, two, "unknown", "possible: sampling")
    report = both_ways(tmp_path, one, none)  # raw logprobs would not depend on it
    assert report.ok and "neither side has" in report.not_compared["sampling.logprobs"]
    check(one, scored(temperature=1.0, logprobs="raw"))
    for text, left, right in (
        ("neither side has sampling", small(), small()),
        ("train has no sampling", raw, scored()),
        ("rollout has no sampling", scored(), raw),
        ("the logprobs that it describes are not on both sides", small(sampling={}), processed),
    ):
        if left.sampling is not None and left.rollout_logprobs is None:
            left.sampling = {"logprobs": "raw"}
        report = compare([left], [right], require=("sampling",))
        assert not report.ok and report.not_compared["sampling"] == f"{text} (1 of 1 samples)"
    unlike = other(raw, rollout_logprobs=raw.rollout_logprobs - 1)
    report = check(raw, unlike, require=("sampling",))
    assert "not compared" in report.not_compared["rollout_logprobs"]


# ---- what is replayed ------------------------------------------------------------------------------


def sides():
    left = make_sample([("text", [1, 2, 3, 4]), ("response", [5, 6, 7, 8], 0)])
    rng = np.random.default_rng(0)
    left.kept_ids, left.routed_experts = kept_of(left, rng), routes_of(left, rng)
    left.teachers = {"t": teacher_of(left, rng)}
    left.sampling = {"top_p": 0.8, "top_k": 1024, "logprobs": "processed", "temperature": 1.0}
    left.rollout_logprobs = -np.ones(4, np.float32)
    return left, copy.deepcopy(left)


@pytest.mark.parametrize(
    ("name", "cause"), [("kept_ids", "truncated_support"), ("routed_experts", "routing")]
)
def test_only_one_side_has_what_is_replayed(tmp_path, name, cause):
    for side in (0, 1):
        pair = sides()
        setattr(pair[side], name, None)
        report = both_ways(tmp_path, *pair)
        assert list(report.causes) == [cause] and name in report.not_compared
        first = report.first
        assert first.field == name and f"no {name}" in (first.left, first.right)[side]
        if name == "kept_ids":
            assert "(top_p 0.8, top_k 1024)" in first.evidence and "support=" in first.fix
    left, right = sides()
    for sample in (left, right):
        setattr(sample, name, None)
    assert name not in check(left, right).not_compared
    assert not compare([left], [right], require=(name,)).ok


def test_other_lists_and_experts():
    left, right = sides()
    check(left, right)
    lists = [row.tolist() for row in left.kept_ids.lists()]
    right.kept_ids = mp.schema.Ragged.of([*lists[:2], [*lists[2], 99], lists[3]])
    said = "1 of 4 lists of kept ids differ"
    first = check(left, right, "truncated_support", said).first
    assert (first.index, first.span) == (6, (6, 7))
    left, right = sides()
    right.routed_experts = np.ascontiguousarray(right.routed_experts[..., ::-1])  # the same k
    right.routed_experts[-1] = 0  # no logprob reads the last token
    check(left, right)
    right.routed_experts[3, 1] = (left.routed_experts[3, 1] + 2) % 8
    said = "1 of 7 tokens that a logprob reads take other experts, the first in layer 1"
    first = check(left, right, "routing", said).first
    assert (first.index, first.span) == (3, (3, 4))
    right.routed_experts = routes_of(right, np.random.default_rng(0), 3, 2)
    check(left, right, "routing", "another number of layers")
    for sample in (left, right):
        sample.routed_experts, sample.kept_ids = None, mp.schema.Ragged.of([[1], [6], [7], [8]])
    check(left, right, "unknown", "MM333 in both sides")


def test_other_ids_move_what_is_replayed():
    left, _ = sides()
    right = make_sample([("text", [1, 2, 3, 4, 9]), ("response", [5, 6, 7, 8], 0)])
    right.sampling, right.rollout_logprobs = left.sampling, left.rollout_logprobs
    rng = np.random.default_rng(1)
    right.kept_ids, right.routed_experts = kept_of(right, rng), routes_of(right, rng)
    right.teachers = {"t": teacher_of(right, rng)}
    report = compare([left], [right])
    assert not report.ok and {"truncated_support", "routing"}.isdisjoint(report.causes)
    for name in ("kept_ids", "routed_experts", "teachers"):
        assert "not compared where ids differ" in report.not_compared[name]


def test_teachers(tmp_path):
    left, right = sides()
    right.teachers = {"t": teacher_of(right, np.random.default_rng(5))}
    first = both_ways(tmp_path, left, right).first
    assert (first.field, first.cause, first.fix) == ("teachers", "unknown", RECORDS["teachers"])
    lists = left.teachers["t"]
    more = check(left, other(left, teachers={"t": lists, "u": lists}), "unknown")
    assert more.first.field == "teachers"
    report = check(left, other(left, teachers=None))
    assert "train" in report.not_compared["teachers"]
    near = (lists.logprobs * (1 + 1e-6)).astype(np.float32)  # as after six digits
    check(left, other(left, teachers={"t": mp.schema.Ragged(lists.offsets, lists.ids, near)}))
    check(small(), small(schema_version="1"))
