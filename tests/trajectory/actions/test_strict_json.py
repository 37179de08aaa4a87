"""JSON read strictly, and where its values stand: Python's own `json` is the oracle of values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import TraceError
from mmpack.trajectory.actions.strict_json import end_of_json, places, read_json

LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=12,
)


def each(value, path=()):
    yield path, value
    inside = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inside:
        yield from each(item, (*path, key))


@given(value=VALUES, indent=st.none() | st.integers(0, 2), ascii=st.booleans())
def test_each_value_stands_where_places_says(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read_json(text, "here") == value
    found = places(text)
    assert found.keys() == {path for path, _ in each(value)}
    for path, item in each(value):
        start, stop = found[path]
        assert json.loads(text[start:stop]) == item
        assert text[start:stop].strip() == text[start:stop]


@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), more=st.text())
def test_the_end_of_an_object(value, more):
    text = json.dumps(value)
    assert end_of_json("x" + text + more, 1)[0] == 1 + len(text)
    assert end_of_json("x" + text[:-1], 1)[0] == -1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON at character 0"),
        ("{'a': 1}", "not JSON at character 1"),
        ('{"a": 1} x', "Extra data"),
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "-Infinity"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"b": {"a": 1, "a": 1}}', "'a' twice"),
        ("[" * 33 + "]" * 33, "deeper than 32"),
        ("9" * 5000, "too many digits"),
        ('{"a": "\n"}', "control character"),
        ('{"a": "', "Unterminated"),
    ],
)
def test_what_is_refused(text, why):
    with pytest.raises(TraceError, match=why) as caught:
        read_json(text, "here")
    assert caught.value.code == "MM211" and "\n" not in str(caught.value)
