"""`Sample.to_dict` and `from_dict`: through Python's json and back, bit for bit; reprs that fit a line."""

import json

import numpy as np
import pytest
from hypothesis import given, settings

import mmpack as mp
from mmpack.errors import TraceError
from tests.support.samples import full_sample, make_sample, samples


@settings(max_examples=30)
@given(samples())
def test_json_and_back(sample):
    back = mp.Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert back == sample and back is not sample
    for name in ("input_ids", "position_ids", "attention_mask", "rollout_logprobs"):
        mine, theirs = getattr(sample, name), getattr(back, name)
        assert mine is None or (mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes())


def test_numpy_stays_numpy_and_records_have_both_functions():
    sample = full_sample()
    record = sample.to_dict(numpy=True)
    assert record["input_ids"] is sample.input_ids
    assert mp.Sample.from_dict(record) == sample
    assert type(sample.to_dict()["position_ids"][0]) is list
    for record in (*sample.media, *sample.loss_spans, *sample.rewards):
        assert type(record).from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    ("record", "match"),
    [(None, "Sample: expected an object"), ({}, r"Sample\.schema_version: is missing \(MM004\)")],
)
def test_refused_in_one_line(record, match):
    with pytest.raises(TraceError, match=match) as caught:
        mp.Sample.from_dict(record)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_reprs_are_short():
    sample = make_sample([("image", (1, 8, 8)), ("response", list(range(5000)), 0)])
    sample.media[0].pixel_values = np.ones((64, 1176), np.float32)
    assert repr(sample).endswith("family='qwen2_5_vl', tokens=5018, media=1, loss_tokens=5000)")
    assert repr(sample.media).endswith("num_tokens=16, pixel_values=[64, 1176])]")
    assert repr(object.__new__(mp.Sample)).startswith("Sample(?, group_id=?")
    assert len(repr(make_sample([("text", [1])], sample_id="x" * 5000))) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", None),
        ("media", [1]),
        ("loss_spans", [(1, 2)]),
        ("loss_spans", [mp.LossSpan(None, 3)]),
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


def test_a_bound_on_one_side_is_named_as_one():
    sample = make_sample([("text", [1, 2, 3])])
    sample.position_ids = np.full((3, 3), 2**60)
    with pytest.raises(TraceError, match=r"position_ids\[0\]: \d+ is above \d+ \(MM003\)"):
        mp.Sample.from_dict(sample.to_dict(numpy=True))
