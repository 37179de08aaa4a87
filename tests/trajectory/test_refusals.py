"""Wrong arguments, records and logs: one line that says what, and its fix."""

import copy
import dataclasses
import math
import re

import numpy as np
import pytest
from support.recorded_trees import processor as wrapped
from support.samples import make_sample
from support.trajectories import episode, grown, screen, shot

import mmpack as mp
import mmpack.adapters.verl
from mmpack.errors import ArgumentError, LayoutError, TraceError
from mmpack.schema import actions as a
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.spans import Cost, Score
from mmpack.trajectory import (
    Record,
    Trajectory,
    Turn,
    from_calls,
    from_chat,
    from_records,
    from_samples,
    group_index,
    to_samples,
    trajectory_groups,
    truncate,
    window,
)
from mmpack.trajectory.actions.formats import read_action, read_tool_call, write_action

PAD, EOS = 151655, 151645


def refused(call, message, error=ArgumentError):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "Fix: " in str(caught.value) and "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_ids": []}, "context_ids is empty"),
        ({"context_ids": [1.5]}, "context_ids is of shape"),
        ({"context_ids": [-1]}, "below 0 at 0"),
        ({"context_ids": "text"}, "context_ids is of type str"),
        ({"context_ids": [[1], [1, 2]]}, "not an array"),
        ({"context_ids": [True]}, "dtype bool"),
        ({"logprobs": [math.nan, 0]}, "is nan"),
        ({"logprobs": [-1]}, r"expected numbers \[2\]"),
        ({"media": [3]}, r"media\[0\] is"),
        ({"source": "moon"}, "source is 'moon'"),
        ({"finish_reason": "tired"}, "finish_reason"),
        ({"observation_media": screen([1], shot("a0"))[1]}, "without"),
        ({"loss_spans": [mp.LossSpan(0, 1)]}, "within"),
        ({"rewards": [Score("a", 1.0, {"turn": 0})]}, "scope"),
        ({"rewards": [Cost("c", 1.0)]}, "expected Score"),
        ({"costs": [Score("c", 1.0)]}, "expected Cost"),
        ({"kept_ids": [[1], [2]]}, "kept_ids"),
        ({"kept_ids": Ragged.of([[1]])}, "kept_ids has 1 lists for 2"),
        ({"teachers": {"t": Ragged.of([[1], [2]])}}, "teachers"),
        ({"routed_experts": np.zeros((3, 1, 1))}, "routed_experts"),
        ({"routed_experts": np.zeros((4, 1, 1), np.uint8)}, "routed_experts has routes for 4"),
    ],
)
def test_turns(fields, message):
    refused(lambda: Turn(**({"context_ids": [1], "response_ids": [4, 5]} | fields)), message)


def test_trajectories_and_their_samples():
    end = [Score("a", 1.0, {"turn": 5})]
    refused(lambda: Trajectory("e", "g", "llama", []), "family is 'llama'")
    refused(lambda: Trajectory("e", "g", "qwen2_vl", [None]), r"turns\[0\] is None")
    refused(lambda: Trajectory(3, "g", "qwen2_vl", []), "trajectory_id is of type int")
    refused(lambda: Trajectory("e", "g", "qwen2_vl", [], metadata=None), "metadata is None")
    refused(lambda: to_samples(episode([Turn([1], [2])], rewards=end)), "belongs to turn 5")
    refused(lambda: to_samples([]), "expected Trajectory")
    refused(lambda: to_samples(episode([]), merge="yes"), "merge is of type str")
    ids, _ = screen([1], shot("a0"))
    refused(lambda: to_samples(episode([Turn(ids, [2])])), r"'e' turn 0: .*media", LayoutError)
    turns = grown(2)
    turns[1].kept_ids = Ragged.of([[i] for i in turns[1].response_ids])
    refused(lambda: to_samples(episode(turns)), "1 of 2 turns of one sample have kept_ids")
    (sample,) = to_samples(episode(grown(2)))
    changed = {
        "no loss spans": {"loss_spans": [], "rollout_logprobs": None},
        r"position_ids .*token 1": {"position_ids": np.zeros((3, len(sample)), np.int64)},
    }
    for message, fields in changed.items():
        refused(lambda f=fields: from_samples([dataclasses.replace(sample, **f)]), message)
    other = dataclasses.replace(sample, sample_id="x", group_id="another")
    refused(lambda: from_samples([sample, other]), "differ in group_id")
    two = [dataclasses.replace(sample, sample_id=k, rewards=[Score("a", 1.0)]) for k in "ab"]
    refused(lambda: from_samples(two), "belongs to more than one turn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [10**9]}, "the vocabulary has ids"),
        ({"mask": [1]}, "mask has shape"),
        ({"mask": [2, 1]}, "expected 0 or 1"),
        ({"mask": [10**400, 1]}, "expected 0 or 1"),
        ({"logprobs": [-1.0]}, "logprobs is of shape"),
        ({"logprobs": [math.nan, -1.0]}, "nan"),
        ({"media": "x"}, "media is of type str"),
        ({"policy_versions": 1.5}, "policy_versions is of type float"),
        ({"policy_versions": [(0, 2, "v"), (1, 2, "w")]}, r"policy_versions\[1\] is .* after 2"),
        ({"policy_versions": ["v"]}, r"policy_versions\[0\] is of type str"),
        ({"kept_ids": [[3]]}, "kept_ids has 1 lists for 2 response ids"),
        ({"kept_ids": 3}, "lists is of type int"),
        ({"kept_ids": [[3], []]}, "kept_ids is empty at response id 1"),
        ({"teachers": {"t": [[3], [4]]}}, "teachers"),
        ({"routed_experts": [1]}, r"values is int64 \[1\]"),
        ({"routed_experts": [[[1]]]}, "routed_experts end at token 1, but the answer at 4"),
        ({"rewards": [1.0]}, r"rewards is of shape \[1\]"),
        ({"rewards": "1"}, "expected finite numbers"),
        ({"rewards": 1.0, "turn_rewards": [1.0]}, "has both rewards and turn_rewards"),
        ({"turn_rewards": 1.0}, "turn_rewards is a number"),
        ({"finish_reason": "done"}, "finish_reason is 'done'"),
    ],
)
def test_records(change, message):
    record = dataclasses.replace(Record([1, 2], [3, 4]), **change)
    about = {"trajectory_id": "e", "group_id": "task"}
    refused(lambda: from_records([record], wrapped(), **about), message)


def test_lists_of_records_and_rows():
    about = {"trajectory_id": "e", "group_id": "task"}
    good = Record([1, 2], [3, 4])
    for records, message in (
        ([], "records is empty"),
        (good, "records is of type Record"),
        ([{"prompt_ids": [1]}], r"records\[0\] is of type dict"),
    ):
        refused(lambda r=records: from_records(r, wrapped(), **about), message)
    refused(lambda: from_records([good], None, **about), r"Fix: pass mp\.wrap_processor")
    refused(lambda: from_records([good], wrapped(), resampled="first", **about), "resampled is")
    shown = Record([1, 151652, PAD, 151653], [5])
    refused(lambda: from_records([shown], wrapped(), **about), "MM104", LayoutError)
    wide = Record([1, 2], [3], routed_experts=np.array([[[300, 1]]] * 3))
    refused(lambda: from_records([wide], wrapped(), num_experts=128, **about), "128 experts")
    refused(lambda: from_records([good], wrapped(), expanded="yes", **about), "expanded is")


def test_groups():
    def made(**fields):
        turn = Turn([1], [2], rewards=[Score("format", 0.25)], **fields)
        return to_samples(episode([turn], rewards=[Score("task", 1.0)]))

    other = dataclasses.replace(made()[0], group_id="another")
    refused(lambda: trajectory_groups([*made(), other]), "trajectory 'e' is in the groups")
    refused(lambda: group_index(made(), by="turn"), "by is 'turn'")
    refused(lambda: group_index(made()[0]), "expected a list of Samples")
    names = "weights name 'tsk', which no reward has, and leave out 'format', 'task'"
    refused(lambda: trajectory_groups(made(), {"tsk": 1.0}), names)
    refused(lambda: trajectory_groups(made(), {"task": math.nan}), r"weights\['task'\] is nan")
    for wrong, says in ((Cost("c", 1.0), "expected Score"), (Score("s", math.nan), "is nan")):
        broken = dataclasses.replace(made()[0], rewards=[wrong])
        refused(lambda b=broken: trajectory_groups([b]), says)
    bare = made()[0]
    bare.turn = bare.loss_spans[0].turn = None
    refused(lambda: group_index([bare], by="step"), "has no turn")


CHAT = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "a", "token_ids": [7, EOS], "logprobs": [-0.1, -0.2]},
]
CHOICE = {
    "message": {"role": "assistant", "content": "x"},
    "logprobs": {"content": [{"token": "token_id:5", "logprob": -0.1}]},
}
CALL = {"messages": CHAT[:1], "prompt_token_ids": [5, 6], "choices": [CHOICE]}


def of_part(kind, about):
    return {"role": "user", "content": [{"type": kind, kind: about}]}


@pytest.mark.adapter
@pytest.mark.parametrize(
    ("log", "message"),
    [
        (CHAT[:1], "no message is an assistant's"),
        (CHAT[1:], r"messages\[0\] is an assistant's, but no message comes before it"),
        ("text", "messages is of type str"),
        ([{"content": "x"}], "has no role"),
        ([of_part("image_url", {"url": "https://x.com/a.png"}), CHAT[1]], "fetches nothing"),
        ([of_part("input_audio", {"data": "AAAA", "format": "wav"}), CHAT[1]], "takes no audio"),
        ([CHAT[0], CHAT[1] | {"finish_reason": "tired"}], "finish_reason 'tired'"),
        ([CHAT[0], CHAT[1] | {"token_ids": [5]}], "1 token_ids and 2"),
        ([CHAT[0], CHAT[1] | {"token_ids": "abc"}], "token_ids"),
        ([CHAT[0], CHAT[1] | {"logprobs": 1.5}], "logprobs is"),
        ([CHAT[0], CHAT[1] | {"tool_calls": 7}], "tool_calls is"),
        ([{"role": "user", "content": "\ud800"}, CHAT[1]], "lone surrogate"),
    ],
)
def test_chats(processor, log, message):
    refused(lambda: from_chat(log, processor, trajectory_id="e", group_id="g"), message)


@pytest.mark.adapter
@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (None, "calls is None"),
        ([], "no call"),
        ([3], r"calls\[0\] is of type int"),
        ([CALL | {"choices": []}], "has no choices"),
        ([{"choices": [{}]}], r"calls\[0\].messages is None"),
        ([CALL | {"choices": [{}]}], "message is None"),
        (
            [CALL | {"choices": [CHOICE | {"logprobs": {"content": ["x"]}}]}],
            "not a list of objects",
        ),
    ],
)
def test_calls(processor, calls, message):
    refused(lambda: from_calls(calls, processor, trajectory_id="e", group_id="g"), message)


@pytest.mark.adapter
@pytest.mark.parametrize("token", ["token_id:" + "9" * 5000, "token_id:٣", "token_id:-1", None])
def test_tokens_of_calls_that_name_no_id(processor, token):
    """Such an answer is rendered, and marked."""
    call = copy.deepcopy(CALL)
    call["choices"][0]["logprobs"]["content"][0]["token"] = token
    made = from_calls([call], processor, trajectory_id="e", group_id="g")
    assert made.turns[0].metadata["reencoded"] == ["response"]


def test_windows_and_cuts():
    turns = grown(2)
    (sample,) = to_samples(episode(turns))
    refused(lambda: truncate(sample, 0), "max_tokens is 0")
    refused(lambda: truncate(sample, 5, "middle"), "side is 'middle'")
    refused(lambda: truncate([sample], 5), "is list, expected Sample")
    refused(lambda: truncate(sample, 5, instead_ids=[PAD]), "instead_ids holds a placeholder")
    refused(lambda: window(sample, -1), "last is -1")
    refused(lambda: window(sample, True), "last is True")
    refused(lambda: window(sample, 1, what="words"), "what is 'words'")
    refused(lambda: window(sample, 1, what="turns", pinned=1), "pinned is for")
    turns[1] = dataclasses.replace(turns[1], observation_ids=screen([3], shot("b0"))[0])
    turns[1].observation_media = screen([3], shot("b0"))[1]
    (seen,) = to_samples(episode(turns), keep_last_observation=True)
    refused(lambda: window(seen, 0, what="turns"), "last is 0")
    sample.routed_experts = compact_routes(np.ones((len(sample), 1, 1), int), 8)
    cut = {"side": "left", "changed_context": True, "instead_ids": [5, 6]}
    refused(lambda: truncate(sample, len(sample) - 1, **cut), "replace what is cut have none")


CALLS = [
    (3, "action expected an object"),
    ({"name": "computer_use"}, "action.arguments is missing"),
    ({"name": "mobile_use", "arguments": {}}, "action.name is mobile_use, expected computer_use"),
    ({"action": "fly"}, "action.arguments.action 'fly' is none of key, type"),
    ({"action": "mouse_move"}, "arguments.coordinate is missing"),
    ({"action": "left_click", "coordinate": [1]}, "arguments.coordinate expected 2 values"),
    ({"action": "left_click", "coordinate": [1, math.nan]}, "not a finite number"),
    ({"action": "left_click", "coordinate": [1, 10**400]}, "beyond 64 bits|too large"),
    ({"action": "wait", "time": -1}, "arguments.time -1 seconds"),
    ({"action": "type", "text": "\udfff"}, "lone surrogate"),
]
RECORDS = [
    ({}, "function is missing"),
    ({"type": "custom", "function": {}}, "type 'custom' is none of function"),
    ({"function": {"name": "f", "arguments": "{"}}, "function.arguments is not JSON"),
    ({"function": {"name": "f", "arguments": {}, "x": 1}}, "unknown field 'x'"),
]
UNHELD = [
    (a.Click((1, 2), modifiers=("ctrl",)), "computer_use", "modifiers"),
    (a.Click((1, 2), "right"), "mobile_use", "button"),
    (a.Click(), "mobile_use", "lack of point"),
    (a.Swipe((1, 2), (3, 4)), "computer_use", "no such action"),
    (a.Key(("a", "b")), "mobile_use", "more than one key"),
    (a.ToolCall("mobile_use", {}), "computer_use", "mobile_use"),
    (a.Wait(1, {"time": 2}), "computer_use", "name of its arguments"),
    (a.Wait(1, {"call": {"name": "x"}}), "computer_use", "other names"),
]


def test_actions_in_formats():
    for value, why in CALLS:
        if isinstance(value, dict) and "name" not in value:
            value = {"name": "computer_use", "arguments": value}
        error = refused(lambda v=value: read_action(v, "computer_use"), "action", TraceError)
        assert re.search(why, f"{error.where} {error.why}"), why
    for record, why in RECORDS:
        error = refused(lambda r=record: read_tool_call(r), "tool_call", TraceError)
        assert why in f"{error.where} {error.why}"
    for action, tool, why in UNHELD:
        refused(lambda x=action, t=tool: write_action(x, t), why)
    refused(lambda: read_action({}, "qwen"), "format is 'qwen'")


def test_readers_of_actions():
    sample = make_sample([("text", [1]), ("response", [2, 3], 0)])
    words, find = [b"?"] * 4, mp.trajectory.find_actions
    refused(lambda: find("x", words.__getitem__), "find_actions")
    refused(lambda: find(sample, 3), "tokenizer")
    refused(lambda: find(sample, words.__getitem__, think=("", "x")), "two marks")
    refused(lambda: find(sample, words.__getitem__, malformed=math.nan), "malformed is nan")
    refused(lambda: find(sample, words.__getitem__, system="pixels"), "pixels")
    sample.loss_spans[0].stop = 10**6
    refused(lambda: find(sample, words.__getitem__), "MM201")


@pytest.mark.adapter
@pytest.mark.parametrize("value", ["1", [], {}])
def test_scores_of_verl_are_numbers(processor, value):
    """A text that reads as a number is none: it would be trained on."""
    row = {"prompt_ids": [5], "response_ids": [7], "response_mask": [1]}
    bad = row | {"reward_score": value}
    refused(lambda: mp.adapters.verl.to_trajectories([bad], processor), "reward_score is .+ number")
