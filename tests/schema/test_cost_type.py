"""A cost is written as a score is, and is none: no list of one takes the other."""

import json

import pytest
from support.samples import full_sample

import mmpack as mp
from mmpack.schema.trace import read_trace, write_trace


def test_no_type_is_the_other():
    assert not issubclass(mp.Cost, mp.Score) and not issubclass(mp.Score, mp.Cost)
    assert mp.Cost("a", 1.0) != mp.Score("a", 1.0)
    assert mp.Cost("a", 1.0, {"turn": 1}).to_dict() == mp.Score("a", 1.0, {"turn": 1}).to_dict()
    assert list(mp.Cost.columns()) == list(mp.Score.columns())


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.parquet"])
def test_a_trace_keeps_both_types(tmp_path, name):
    write_trace(tmp_path / name, [full_sample()])
    (sample,) = read_trace(tmp_path / name)
    assert sample == full_sample()
    assert [type(c) for c in sample.costs] == [mp.Cost]
    assert {type(s) for s in (*sample.rewards, *sample.verifiers)} == {mp.Score}


def test_a_trace_that_was_written_before_is_read(tmp_path):
    """A record as mmpack wrote it when costs were Scores: the JSON is the same."""
    record = full_sample().to_dict()
    record["costs"] = [{"name": "harm", "value": 0.25, "scope": {"turn": 1}, "judge": "v1"}]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    (sample,) = read_trace(tmp_path / "old.jsonl")
    assert sample.costs == [mp.Cost("harm", 0.25, {"turn": 1}, {"judge": "v1"})]
    assert mp.validate([sample]) == []


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("costs", mp.Score("a", 0.0)),
        ("rewards", mp.Cost("a", 0.0)),
        ("verifiers", mp.Cost("a", 0.0)),
    ],
)
def test_neither_is_packed_in_the_other_s_place(field, wrong):
    sample = full_sample()
    setattr(sample, field, [wrong])
    with pytest.raises(mp.SchemaError, match=rf"{field}\[0\].*{type(wrong).__name__}"):
        mp.pack([sample])
