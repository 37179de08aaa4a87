"""`Sample.to_dict` and `from_dict`: through Python's json and back, bit for bit; reprs that fit a line."""

import json

import numpy as np
import pytest
from hypothesis import given

import mmpack as mp
from mmpack.errors import TraceError
from tests.support.samples import full_sample, make_sample, samples


@given(samples())
def test_json_and_back(sample):
    back = mp.Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert back == sample and back is not sample
    for name in ("input_ids", "position_ids", "attention_mask", "rollout_logprobs"):
        mine, theirs = getattr(sample, name), getattr(back, name)
        assert mine is None or (mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes())


def test_numpy_stays_numpy():
    sample = full_sample()
    record = sample.to_dict(numpy=True)
    assert record["input_ids"] is sample.input_ids
    assert mp.Sample.from_dict(record) == sample
    assert type(sample.to_dict()["position_ids"][0]) is list


def test_unknown_fields_are_kept():
    record = full_sample().to_dict() | {"engine": {"name": "x"}}
    record["media"][0]["lens"] = 35
    once = mp.Sample.from_dict(record)
    assert once.metadata["engine"] == {"name": "x"} and once.media[0].metadata["lens"] == 35
    assert mp.Sample.from_dict(json.loads(json.dumps(once.to_dict()))) == once


def test_spans_and_media_have_them_too():
    sample = full_sample()
    for record in (*sample.media, *sample.loss_spans, *sample.rewards):
        assert type(record).from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (None, "Sample: expected an object"),
        ({}, r"Sample\.schema_version: is missing \(MM004\)"),
        (full_sample().to_dict() | {"input_ids": [1.5]}, r"Sample\.input_ids\[0\]"),
    ],
)
def test_refused_in_one_line(record, match):
    with pytest.raises(TraceError, match=match) as caught:
        mp.Sample.from_dict(record)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_reprs_are_short():
    sample = make_sample([("image", (1, 8, 8)), ("response", list(range(5000)), 0)])
    sample.media[0].pixel_values = np.ones((64, 1176), np.float32)
    assert repr(sample) == (
        "Sample('s0', group_id='g0', family='qwen2_5_vl', tokens=5018, media=1, loss_tokens=5000)"
    )
    assert repr(sample.media) == (
        "[Medium('image-0', 'image', grid_thw=(1, 8, 8), num_tokens=16, pixel_values=[64, 1176])]"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", None),
        ("input_ids", 3),
        ("media", None),
        ("media", 3),
        ("media", [1]),
        ("loss_spans", None),
        ("loss_spans", 5),
        ("loss_spans", [(1, 2)]),
        ("loss_spans", [None]),
        ("loss_spans", [mp.LossSpan(None, 3)]),
        ("rewards", 3),
        ("screen_size", 5),
    ],
)
def test_a_malformed_sample_is_shown_and_named(tmp_path, field, value):
    sample = make_sample([("image", (1, 8, 8)), ("response", [5, 6], 0)])
    setattr(sample, field, value)
    assert repr(sample).startswith("Sample('s0', group_id='g0', family='qwen2_5_vl', tokens=")
    with pytest.raises(TraceError, match=rf"samples\[0\]\.{field}.*Fix: "):
        mp.write_trace(tmp_path / "a.jsonl", [sample])
    assert not list(tmp_path.iterdir())


def test_a_grid_of_fractions_is_not_cut(tmp_path):
    sample = make_sample([("image", (1, 8, 8)), ("response", [5, 6], 0)])
    sample.media[0].grid_thw = (1, 8.5, 8)
    with pytest.raises(TraceError, match=r"grid_thw\[1\]: expected an integer, found 8\.5"):
        mp.write_trace(tmp_path / "a.jsonl", [sample])


def test_reprs_of_what_was_never_made():
    assert repr(object.__new__(mp.Sample)) == (
        "Sample(?, group_id=?, family=?, tokens=?, media=?, loss_tokens=?)"
    )
    assert repr(object.__new__(mp.Medium)).startswith("Medium(?, ?, grid_thw=?")
    assert len(repr(make_sample([("text", [1])], sample_id="x" * 5000))) < 200


@pytest.mark.parametrize(
    ("path", "given", "match"),
    [
        ([], "a.jsonl", r"\[\] is not a path"),
        ("a.jsonl", full_sample(), r"samples is Sample, expected Samples. Fix: pass \[sample\]"),
        ("a.jsonl", None, "samples is NoneType"),
    ],
)
def test_arguments_that_are_swapped_or_single(tmp_path, monkeypatch, path, given, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mp.ArgumentError, match=match):
        mp.write_trace(path, given)
    assert not list(tmp_path.iterdir())


def test_a_bound_on_one_side_is_named_as_one():
    sample = make_sample([("text", [1, 2, 3])])
    sample.position_ids = np.full((3, 3), 2**60)
    with pytest.raises(TraceError, match=r"position_ids\[0\]: \d+ is above \d+ \(MM003\)"):
        mp.Sample.from_dict(sample.to_dict(numpy=True))
