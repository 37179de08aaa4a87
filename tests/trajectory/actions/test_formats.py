"""Formats of actions, read and written: round trips, Qwen's own examples, what they refuse."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmpack.errors import TraceError
from mmpack.schema import actions as a
from mmpack.schema.json_schema import action_schema
from mmpack.trajectory import (
    action_text,
    read_action,
    read_tool_call,
    write_action,
    write_tool_call,
)
from mmpack.trajectory.actions.formats import FORMATS
from mmpack.trajectory.actions.qwen import TOOLS

SCHEMA = jsonschema.Draft202012Validator(action_schema())
NUMBERS = st.integers(-5000, 5000).map(float) | st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.tuples(NUMBERS, NUMBERS)
SECONDS = st.floats(0, 1e6)
MARKS = ["<tool_call>", "</tool_call>", '{"kind": 1}', "\\", '"', "深圳 🙂", "<think>", "\\u003c"]
WORDS = st.text(max_size=9) | st.sampled_from(MARKS)
KEYS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)
HELD = st.lists(st.sampled_from(a.MODIFIERS), max_size=2).map(tuple)
FREE = st.dictionaries(
    st.text(max_size=4), NUMBERS | WORDS | st.lists(st.booleans(), max_size=2), max_size=2
)
MORE = FREE.map(lambda d: {f"x_{k}": v for k, v in d.items()})  # fields that nobody knows


def _of(cls, **fields):
    return st.builds(cls, **fields, metadata=MORE)


BOTH = [
    _of(a.Type, text=WORDS),
    _of(a.Wait, seconds=SECONDS),
    _of(a.Terminate, status=st.sampled_from(a.STATUSES)),
    _of(a.Answer, text=WORDS),
    st.builds(a.ToolCall, name=WORDS.filter(lambda n: n not in TOOLS), arguments=FREE),
]
DESKTOP = [
    *BOTH,
    _of(a.Click, point=st.none() | POINTS, button=st.sampled_from(a.BUTTONS)),
    _of(a.DoubleClick, point=st.none() | POINTS),
    _of(a.TripleClick, point=st.none() | POINTS),
    _of(a.Move, point=POINTS),
    _of(a.Drag, to=POINTS),
    _of(a.Scroll, dy=NUMBERS, point=st.none() | POINTS),
    _of(a.Scroll, dx=NUMBERS, point=st.none() | POINTS),
    _of(a.Key, keys=KEYS),
]
PHONE = [
    *BOTH,
    _of(a.Click, point=POINTS),
    _of(a.LongPress, point=POINTS, seconds=SECONDS),
    _of(a.Swipe, point=POINTS, to=POINTS),
    _of(a.Key, keys=KEYS.map(lambda k: k[:1])),
    _of(a.SystemButton, button=st.sampled_from(a.SYSTEM_BUTTONS)),
    _of(a.OpenApp, app=WORDS),
]
ALL = [
    *DESKTOP,
    *PHONE,
    _of(a.Click, point=POINTS, modifiers=HELD),
    _of(a.Drag, to=POINTS, point=POINTS, button=st.sampled_from(a.BUTTONS), modifiers=HELD),
    _of(a.Swipe, point=POINTS, to=POINTS, seconds=SECONDS),
    _of(a.LongPress, point=POINTS),
    _of(a.Scroll, dx=NUMBERS, dy=NUMBERS, modifiers=HELD),
]
HELD_BY = {"json": ALL, "computer_use": DESKTOP, "mobile_use": PHONE}


@given(data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name, data):
    action = data.draw(st.one_of(HELD_BY[name]))
    call = write_action(action, name)
    assert read_action(call, name) == action
    assert read_action(json.loads(json.dumps(call)), name) == action
    text = action_text(action, name)
    assert read_action(text, name) == action
    assert read_action(json.dumps(call), name) == action
    assert write_action(read_action(text, name), name) == call
    assert name == "json" or text.count("<tool_call>") == text.count("</tool_call>") == 1
    SCHEMA.validate(action.to_dict())


@given(data=st.data(), tool=st.sampled_from(sorted(TOOLS)))
def test_tool_calls_round_trip(data, tool):
    action = data.draw(st.one_of(HELD_BY[tool]))
    record = write_tool_call(action, tool)
    assert isinstance(record["function"]["arguments"], str)
    assert read_tool_call(json.loads(json.dumps(record))) == action
    named = read_tool_call(record | {"id": "call_1", "index": 0})
    assert named.metadata["call"] == {"id": "call_1", "index": 0}
    assert write_tool_call(named, tool) == record | {"id": "call_1", "index": 0}
    record["function"]["arguments"] = json.loads(record["function"]["arguments"])
    assert read_tool_call(record) == action


@given(
    kind=st.sampled_from([*a.ACTIONS, "fly"]),
    fields=st.dictionaries(
        st.sampled_from(
            ["point", "to", "text", "dx", "keys", "button", "seconds", "status", "name"]
        )
        | st.sampled_from(["arguments", "modifiers", "app", "dy", "other"]),
        st.sampled_from(
            [1, -1.5, "left", "success", "back", "", [1, 2], [1.5, 2, 3], ["ctrl"], [], {}]
        )
        | st.sampled_from([True, ["a", 1], [1, "2"], "x", 10**400]),
        max_size=4,
    ),
)
def test_the_schema_and_the_reader_refuse_the_same(kind, fields):
    """But for what a schema can't say: integers beyond what a number holds."""
    value = {"kind": kind, **fields}
    try:
        read_action(value)
        read = True
    except TraceError as error:
        assert "\n" not in str(error) and "Fix: " in str(error) and error.code and error.where
        read = False
    assert read == SCHEMA.is_valid(value) or "huge" in str(fields) or 10**400 in _flat(fields)


def _flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in _flat(v)] if isinstance(value, list) else [value]


AT = {"coordinate": [1, 2]}
CALLS = {  # as the definitions describe them, and what they mean
    "computer_use": [
        ({"action": "left_click"} | AT, a.Click((1, 2))),
        ({"action": "left_click"}, a.Click()),  # Qwen2.5-VL: where the cursor is
        ({"action": "right_click"} | AT, a.Click((1, 2), "right")),
        ({"action": "middle_click"} | AT, a.Click((1, 2), "middle")),
        ({"action": "double_click"} | AT, a.DoubleClick((1, 2))),
        ({"action": "triple_click"} | AT, a.TripleClick((1, 2))),
        ({"action": "mouse_move"} | AT, a.Move((1, 2))),
        ({"action": "left_click_drag"} | AT, a.Drag((1, 2))),
        ({"action": "scroll", "pixels": -500}, a.Scroll(dy=500)),  # below 0: down
        ({"action": "hscroll", "pixels": 5}, a.Scroll(dx=5)),
        ({"action": "scroll", "pixels": 5} | AT, a.Scroll(dy=-5, point=(1, 2))),
        ({"action": "key", "keys": ["ctrl", "c"]}, a.Key(("ctrl", "c"))),
        ({"action": "type", "text": "hi"}, a.Type("hi")),
        ({"action": "wait", "time": 2}, a.Wait(2)),
        ({"action": "terminate", "status": "failure"}, a.Terminate("failure")),
        ({"action": "answer", "text": "42"}, a.Answer("42")),
    ],
    "mobile_use": [
        ({"action": "click"} | AT, a.Click((1, 2))),
        ({"action": "key", "text": "volume_up"}, a.Key(("volume_up",))),
        ({"action": "long_press"} | AT | {"time": 2}, a.LongPress((1, 2), 2)),
        ({"action": "swipe"} | AT | {"coordinate2": [3, 4]}, a.Swipe((1, 2), (3, 4))),
        ({"action": "type", "text": "hi"}, a.Type("hi")),
        ({"action": "system_button", "button": "Home"}, a.SystemButton("home")),
        ({"action": "open", "text": "Maps"}, a.OpenApp("Maps")),
        ({"action": "wait", "time": 0.5}, a.Wait(0.5)),
        ({"action": "terminate", "status": "success"}, a.Terminate("success")),
        ({"action": "answer", "text": "42"}, a.Answer("42")),
    ],
}


@pytest.mark.parametrize("tool", CALLS)
def test_what_the_tools_define(tool):
    for arguments, action in CALLS[tool]:
        call = {"name": tool, "arguments": arguments}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        assert read_action(text, tool) == action and action_text(action, tool) == text
        assert write_action(action, tool) == call
    assert {row.name for row in TOOLS[tool]} == {call["action"] for call, _ in CALLS[tool]}


def test_other_tools_and_unknown_arguments_are_kept():
    call = {"name": "web_search", "arguments": {"q": ["a", 1]}, "id": "7"}
    read = read_action(call, "computer_use")
    assert read == a.ToolCall("web_search", {"q": ["a", 1]}, {"call": {"id": "7"}})
    assert write_action(read, "computer_use") == call
    call = {"name": "computer_use", "arguments": {"action": "wait", "time": 1, "why": {"a": None}}}
    assert read_action(call, "computer_use").metadata == {"why": {"a": None}}
    assert write_action(read_action(call, "computer_use"), "computer_use") == call


def test_texts_that_are_no_one_call():
    call = action_text(a.Wait(1), "computer_use")
    for text, why in [
        (call + call, "beside the call"),
        ("Now: " + call, "beside the call"),
        (call[:-3], "not closed"),
        ("<tool_call>" + call, "not closed"),
        ("", "not JSON"),
        ("wait", "not JSON"),
    ]:
        with pytest.raises(TraceError, match=why) as caught:
            read_action(text, "computer_use")
        assert caught.value.code == "MM211"
    assert read_action(f" \n{call}\n", "computer_use") == a.Wait(1)
