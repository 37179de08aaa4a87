"""Formats of actions, read and written: round trips, Qwen's own examples, what they refuse."""

import json
import math
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmpack as mp
from mmpack.errors import ArgumentError, TraceError
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
from mmpack.trajectory.actions.formats.qwen import TOOLS

SCHEMA = jsonschema.Draft202012Validator(action_schema())
NUMBERS = st.integers(-5000, 5000).map(float) | st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.tuples(NUMBERS, NUMBERS)
SECONDS = st.floats(0, 1e6)
WORDS = st.text(max_size=9) | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"kind": 1}',
        "</b>",
        "\\",
        '"',
        "深圳 🙂",
        "<think>",
        "\\u003c",
    ]
)
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
    assert text.count("<tool_call>") == text.count("</tool_call>") == (name != "json") or (
        name == "json"
    )


@given(data=st.data(), tool=st.sampled_from(sorted(TOOLS)))
def test_tool_calls_round_trip(data, tool):
    action = data.draw(st.one_of(HELD_BY[tool]))
    record = write_tool_call(action, tool)
    assert isinstance(record["function"]["arguments"], str)
    assert read_tool_call(json.loads(json.dumps(record))) == action
    named = read_tool_call(record | {"id": "call_1", "index": 0})
    assert named.metadata["call"] == {"id": "call_1", "index": 0}
    assert write_tool_call(named, tool) == record | {"id": "call_1", "index": 0}
    unpacked = json.loads(record["function"]["arguments"])
    assert (
        read_tool_call(record | {"function": record["function"] | {"arguments": unpacked}})
        == action
    )


@given(action=st.one_of(ALL))
def test_the_schema_takes_what_is_written(action):
    SCHEMA.validate(action.to_dict())


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


CALLS = [  # as the definitions describe them, and what they mean
    ("computer_use", {"action": "left_click", "coordinate": [935, 30]}, a.Click((935, 30))),
    ("computer_use", {"action": "left_click"}, a.Click()),  # Qwen2.5-VL: where the cursor is
    ("computer_use", {"action": "right_click", "coordinate": [1, 2]}, a.Click((1, 2), "right")),
    ("computer_use", {"action": "middle_click", "coordinate": [1, 2]}, a.Click((1, 2), "middle")),
    ("computer_use", {"action": "double_click", "coordinate": [1, 2]}, a.DoubleClick((1, 2))),
    ("computer_use", {"action": "triple_click", "coordinate": [1, 2]}, a.TripleClick((1, 2))),
    ("computer_use", {"action": "mouse_move", "coordinate": [1, 2]}, a.Move((1, 2))),
    ("computer_use", {"action": "left_click_drag", "coordinate": [1, 2]}, a.Drag((1, 2))),
    ("computer_use", {"action": "scroll", "pixels": -500}, a.Scroll(dy=500)),  # below 0: down
    ("computer_use", {"action": "hscroll", "pixels": 5}, a.Scroll(dx=5)),
    (
        "computer_use",
        {"action": "scroll", "pixels": 5, "coordinate": [1, 2]},
        a.Scroll(dy=-5, point=(1, 2)),
    ),
    ("computer_use", {"action": "key", "keys": ["ctrl", "c"]}, a.Key(("ctrl", "c"))),
    ("computer_use", {"action": "type", "text": "hi"}, a.Type("hi")),
    ("computer_use", {"action": "wait", "time": 2}, a.Wait(2)),
    ("computer_use", {"action": "terminate", "status": "failure"}, a.Terminate("failure")),
    ("computer_use", {"action": "answer", "text": "42"}, a.Answer("42")),
    ("mobile_use", {"action": "click", "coordinate": [1, 2]}, a.Click((1, 2))),
    ("mobile_use", {"action": "key", "text": "volume_up"}, a.Key(("volume_up",))),
    (
        "mobile_use",
        {"action": "long_press", "coordinate": [1, 2], "time": 2},
        a.LongPress((1, 2), 2),
    ),
    (
        "mobile_use",
        {"action": "swipe", "coordinate": [1, 2], "coordinate2": [3, 4]},
        a.Swipe((1, 2), (3, 4)),
    ),
    ("mobile_use", {"action": "type", "text": "hi"}, a.Type("hi")),
    ("mobile_use", {"action": "system_button", "button": "Home"}, a.SystemButton("home")),
    ("mobile_use", {"action": "open", "text": "Maps"}, a.OpenApp("Maps")),
    ("mobile_use", {"action": "wait", "time": 0.5}, a.Wait(0.5)),
    ("mobile_use", {"action": "terminate", "status": "success"}, a.Terminate("success")),
    ("mobile_use", {"action": "answer", "text": "42"}, a.Answer("42")),
]


@pytest.mark.parametrize(("tool", "arguments", "action"), CALLS)
def test_what_the_tools_define(tool, arguments, action):
    call = {"name": tool, "arguments": arguments}
    assert read_action(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", tool) == action
    assert write_action(action, tool) == call
    assert action_text(action, tool) == f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_every_action_of_the_tools_is_among_them():
    defined = {  # the enums of both tools
        "computer_use": "key type mouse_move left_click left_click_drag right_click middle_click double_click "
        "triple_click scroll hscroll wait terminate answer",
        "mobile_use": "key click long_press swipe type answer system_button open wait terminate",
    }
    for tool, names in defined.items():
        assert {row.name for row in TOOLS[tool]} == set(names.split())
        assert {args["action"] for t, args, _ in CALLS if t == tool} == set(names.split())


def test_other_tools_and_unknown_arguments_are_kept():
    call = {"name": "web_search", "arguments": {"q": ["a", 1]}, "id": "7"}
    read = read_action(call, "computer_use")
    assert read == a.ToolCall("web_search", {"q": ["a", 1]}, {"call": {"id": "7"}})
    assert write_action(read, "computer_use") == call
    call = {"name": "computer_use", "arguments": {"action": "wait", "time": 1, "why": {"a": None}}}
    assert read_action(call, "computer_use").metadata == {"why": {"a": None}}
    assert write_action(read_action(call, "computer_use"), "computer_use") == call


BROKEN = [
    (3, "action expected an object"),
    ({}, "action.name is missing"),
    ({"name": "computer_use"}, "action.arguments is missing"),
    ({"name": "computer_use", "arguments": "{}"}, "action.arguments expected an object"),
    ({"name": 3, "arguments": {}}, "action.name expected a string"),
    ({"name": "mobile_use", "arguments": {}}, "action.name is mobile_use, expected computer_use"),
    (("left_click",), "action expected an object"),
    ({"action": "fly"}, "action.arguments.action 'fly' is none of key, type"),
    ({"action": "click"}, "'click' is none of"),  # of the other tool
    ({"action": ["key"]}, "arguments.action expected a string"),
    ({"coordinate": [1, 2]}, "arguments.action is missing"),
    ({"action": "mouse_move"}, "arguments.coordinate is missing"),
    ({"action": "left_click_drag", "coordinate": None}, "arguments.coordinate is missing"),
    ({"action": "left_click", "coordinate": [1]}, "arguments.coordinate expected 2 values"),
    ({"action": "left_click", "coordinate": "1,2"}, "arguments.coordinate expected an array"),
    (
        {"action": "left_click", "coordinate": [1, "2"]},
        r"arguments.coordinate\[1\] expected a number",
    ),
    ({"action": "left_click", "coordinate": [1, math.nan]}, "not a finite number"),
    ({"action": "left_click", "coordinate": [1, math.inf]}, "not a finite number"),
    ({"action": "left_click", "coordinate": [1, 10**400]}, "beyond 64 bits|too large"),
    ({"action": "scroll"}, "arguments.pixels is missing"),
    ({"action": "key", "text": "a"}, "arguments.keys is missing"),  # as mobile_use has it
    ({"action": "key", "keys": "a"}, "arguments.keys expected an array"),
    ({"action": "wait", "time": -1}, "arguments.time -1 seconds"),
    ({"action": "terminate", "status": "done"}, "arguments.status 'done' is none of"),
    ({"action": "type", "text": "\udfff"}, "lone surrogate"),
    ({"action": "type", "text": 3}, "arguments.text expected a string"),
    ({"action": "wait", "time": 1, "x": {1: 2}}, "not a string"),
]


@pytest.mark.parametrize(("value", "why"), BROKEN)
def test_what_is_refused(value, why):
    if isinstance(value, dict) and value and "name" not in value:
        value = {"name": "computer_use", "arguments": value}
    with pytest.raises(TraceError) as caught:
        read_action(value, "computer_use")
    message = f"{caught.value.where} {caught.value.why}"
    assert re.search(why, message), message
    assert "Fix: " in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code in ("MM003", "MM004", "MM008", "MM009") and message.startswith(
        "action"
    )


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


RECORDS = [
    (None, "expected an object"),
    ({}, "function is missing"),
    ({"type": "custom", "function": {}}, "type 'custom' is none of function"),
    ({"function": []}, "function expected an object"),
    ({"function": {"arguments": "{}"}}, "function.name is missing"),
    ({"function": {"name": "f"}}, "function.arguments is missing"),
    ({"function": {"name": "f", "arguments": "{"}}, "function.arguments is not JSON"),
    ({"function": {"name": "f", "arguments": "[]"}}, "function.arguments expected an object"),
    ({"function": {"name": "f", "arguments": {}, "x": 1}}, "unknown field 'x'"),
    ({"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}, "'a' twice"),
]


@pytest.mark.parametrize(("record", "why"), RECORDS)
def test_records_that_are_no_tool_call(record, why):
    with pytest.raises(TraceError) as caught:
        read_tool_call(record)
    assert why in f"{caught.value.where} {caught.value.why}"


@pytest.mark.parametrize(
    ("action", "tool", "why"),
    [
        (a.Click((1, 2), modifiers=("ctrl",)), "computer_use", "modifiers"),
        (a.Click((1, 2), "right"), "mobile_use", "button"),
        (a.Click(), "mobile_use", "lack of point"),
        (a.Drag((1, 2), (3, 4)), "computer_use", "point"),
        (a.Scroll(dx=1, dy=2), "computer_use", "no place for"),
        (a.Scroll(dx=1), "mobile_use", "no such action"),
        (a.OpenApp("Maps"), "computer_use", "no such action"),
        (a.Swipe((1, 2), (3, 4), 0.5), "mobile_use", "seconds"),
        (a.LongPress((1, 2)), "mobile_use", "lack of seconds"),
        (a.Key(("a", "b")), "mobile_use", "more than one key"),
        (a.ToolCall("mobile_use", {}), "computer_use", "mobile_use"),
        (a.ToolCall("f", {}, {"x": 1}), "computer_use", "metadata"),
        (a.Wait(1, {"time": 2}), "computer_use", "name of its arguments"),
        (a.Wait(1, {"call": {"name": "x"}}), "computer_use", "other names"),
    ],
)
def test_what_a_tool_can_not_say_is_refused(action, tool, why):
    with pytest.raises(ArgumentError, match=why) as caught:
        write_action(action, tool)
    assert "Fix: " in str(caught.value)


def test_wrong_arguments():
    for call in (
        lambda: read_action({}, "qwen"),
        lambda: read_action({}, 3),
        lambda: write_action({"kind": "wait"}, "json"),
        lambda: write_tool_call(a.Wait(1), "json"),
        lambda: a.Click("ab"),
        lambda: a.Click((math.nan, 1)),
        lambda: a.Scroll(),
        lambda: a.Type(None),
        lambda: a.Key("a"),
        lambda: a.Wait(1, metadata=[]),
    ):
        with pytest.raises(ArgumentError, match="Fix: "):
            call()


def test_actions_are_values():
    click = a.Click([3, 4])
    assert click.point == (3.0, 4.0) and click == a.Click((3, 4)) and click != a.Move((3, 4))
    with pytest.raises(AttributeError):
        click.button = "right"
    assert repr(a.Drag((1, 2))) == "Drag(to=(1.0, 2.0), button='left')"
    assert mp.trajectory.Click is a.Click and set(a.ACTIONS) == {
        definition["properties"]["kind"]["const"]
        for definition in action_schema()["$defs"].values()
    }
