"""Columns of records against reading each text with Python's json and `Record.from_dict`."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import TraceError
from mmpack.schema.columns.items import items, parse
from mmpack.schema.media import Medium
from mmpack.schema.spans import LossSpan, RegionSpan, Score

NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**53, 10**30, 1.0, 0.5, -1e300, True, None, "1"])
)
LISTS = st.lists(NUMBERS, max_size=4)
TEXTS = st.sampled_from(["image", "video", "response", "é", "\0", "\ud800", "", "a\nb"])
VALUES = st.one_of(NUMBERS, LISTS, TEXTS, st.just({"a": 1}))


def objects(cls):
    good = {"start": 1, "stop": 3, "media_index": 0, "name": "a", "value": 0.5}
    good |= {"media_id": "m", "modality": "image", "cache_key": "k", "grid_thw": [1, 2, 2]}
    good |= {"num_tokens": 1}
    kept = {name: value for name, value in good.items() if name in cls.columns()}
    names = st.sampled_from([*cls.columns(), "unknown"])
    return st.dictionaries(names, VALUES, max_size=2).map(lambda other: kept | other)


def once(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def read(text, cls):
    """The records of a text as `Record.from_dict` gives them; None where it refuses it."""
    try:
        values = json.loads(text, object_pairs_hook=once)
        assert isinstance(values, list)
        return [cls.from_dict(value, "test") for value in values]
    except (ValueError, AssertionError, TraceError):
        return None


def assert_right(texts, cls):
    column = pa.array(texts, pa.string())
    found = items(column, parse(column, cls), len(texts), cls)
    names = cls.columns()
    for i, text in enumerate(texts):
        here = np.flatnonzero(found.row == i)
        if not found.good[i]:
            assert len(here) == 0
            continue
        wanted = [] if text is None else read(text, cls)
        assert wanted is not None and len(wanted) == len(here), text
        for name in names:
            values = [found.values(name)[k] for k in here]
            for value, record in zip(values, wanted, strict=True):
                if name == "metadata":
                    assert (value or {}) == record.metadata
                elif value is None:
                    assert getattr(record, name) == getattr(cls, name, None)  # its default
                else:
                    np.testing.assert_equal(
                        np.asarray(value), np.asarray(record.to_dict(numpy=True)[name])
                    )
    return found


@given(st.data(), st.sampled_from([LossSpan, RegionSpan, Medium, Score]))
def test_random_records(data, cls):
    lists = data.draw(st.lists(st.lists(objects(cls), max_size=3), min_size=1, max_size=5))
    assert_right([json.dumps(records) for records in lists], cls)


ODD = [
    "[]",
    "  [ ] ",
    "null",
    "{}",
    "[null]",
    "[[]]",
    "[] ]",
    "[] []",
    '[]} {"rows":[]',
    '[]}\n{"rows":[]',
    '[],"rows":[]',
    '[],"more":[]',
    '[{"start":1,"stop":2}]',
    '[\n{"start":1,"stop":2}\n]',
    '[{"start":1,"stop":2,"kind":null,"turn":null}]',
    '[{"start":1,"stop":2,"start":1}]',
    '[{"start":1,"stop":2,"turn":1.0}]',
    '[{"start":1,"stop":2,"turn":1e0}]',
    '[{"start":1,"stop":2,"turn":true}]',
    '[{"start":1,"stop":2,"turn":"1"}]',
    '[{"start":1,"stop":2,"turn":NaN}]',
    '[{"start":1,"stop":2,"turn":99999999999999999999}]',
    '[{"start":1,"stop":2,"kind":"thought"}]',
    '[{"start":1,"stop":2,"later":{"a":[1]}}]',
    '[{"start":-1,"stop":2}]',
    '[{"start":1}]',
    '[{"start":1,"stop":2',
    "",
    None,
]


def test_odd_texts_alone_and_together():
    together = assert_right(ODD, LossSpan)
    alone = [assert_right([text], LossSpan).good[0] for text in ODD]
    assert together.good.tolist() == alone
    assert alone == [text is None or read(text, LossSpan) is not None for text in ODD]


def test_arrow_reads_what_is_plain():
    text = json.dumps([{"start": 1, "stop": 2, "kind": "response", "turn": 3}])
    lists = parse(pa.array([text, None, "[]"]), LossSpan)
    unread = pa.array(["not JSON"] * 3)
    found = items(unread, lists, 3, LossSpan)
    assert found.good.all() and found.numbers("turn").tolist() == [3]


@pytest.mark.parametrize("name", ["fps", "second_per_grid_ts"])
def test_integers_beyond_what_json_carries(name):
    """Arrow can't tell 10**30 from 1e30: `from_dict` refuses only the first."""
    medium = {"media_id": "m", "modality": "video", "cache_key": "k", "grid_thw": [1, 2, 2]}
    records = [medium | {"num_tokens": 1, name: value} for value in (1.5, 10**30, 1e300)]
    texts = pa.array([json.dumps([record]) for record in records])
    for lists in (parse(texts, Medium), None):
        assert items(texts, lists, 3, Medium).good.tolist() == [True, False, True]
