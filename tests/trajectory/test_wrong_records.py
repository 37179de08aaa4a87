"""Records of loops and chats with a field of another type: one line that says which, and no other error."""

import copy

import numpy as np
import pytest

from mmpack.adapters.trl import to_trajectories as of_trl
from mmpack.adapters.verl import to_trajectories as of_verl
from mmpack.errors import ArgumentError
from mmpack.trajectory import Trajectory, from_calls, from_chat, read_action

pytestmark = pytest.mark.adapter
EOS = 151645
VERL = {
    "prompt_ids": [5, 6],
    "response_ids": [7, EOS, 8, 9],
    "response_mask": [1, 1, 0, 1],
    "reward_score": 0.5,
    "extra_fields": {"turn_scores": [0.1, 0.2]},
}
TRL = {
    "prompt_ids": [[5, 6]],
    "completion_ids": [[7, EOS]],
    "logprobs": [[-0.1, -0.2]],
    "env_mask": [[1, 1]],
}
CHAT = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "a", "token_ids": [7, EOS], "logprobs": [-0.1, -0.2]},
]
CALL = {
    "messages": CHAT[:1],
    "prompt_token_ids": [5, 6],
    "choices": [
        {
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "token_id:5", "logprob": -0.1}]},
        }
    ],
}
WRONG = [True, 7, 1.5, "x", object(), np.array(3), {"a": 1}]
LINE = r"^[^\n]+Fix: [^\n]+$"


def with_value(record, path, value):
    out = copy.deepcopy(record)
    at = out
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return out


@pytest.mark.parametrize(
    "value", ["1", "x", [], {}, object()], ids=lambda value: type(value).__name__
)
def test_scores_of_verl_are_numbers(processor, value):
    """A text that reads as a number is none: it would be trained on."""
    with pytest.raises(ArgumentError, match=r"reward_score is .+ expected a number"):
        of_verl([{**VERL, "reward_score": value}], processor)
    with pytest.raises(ArgumentError, match=r"turn_scores\[1\] is .+ expected a number"):
        of_verl([{**VERL, "extra_fields": {"turn_scores": [0.1, value]}}], processor)
    for score in (np.float32(0.5), np.array(0.5), 1, True):
        (made,) = of_verl([{**VERL, "reward_score": score}], processor)
        assert made.rewards[0].value == float(score)


@pytest.mark.parametrize("value", [*WRONG, [7]], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["group_ids", "media"])
def test_options_of_verl(processor, name, value):
    right = name == "group_ids" and isinstance(value, str)
    for given in [value] if right else [value, [value]]:
        with pytest.raises(ArgumentError, match=LINE):
            of_verl([VERL], processor, **{name: given})


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "path",
    [("prompt_ids",), ("completion_ids",), ("logprobs",), ("env_mask",), ("images",)]
    + [("prompt_ids", 0), ("completion_ids", 0), ("logprobs", 0), ("env_mask", 0), ("images", 0)],
)
def test_trl(processor, path, value):
    with pytest.raises(ArgumentError, match=LINE):
        of_trl(with_value({**TRL, "images": [[]]}, path, value), processor)


def test_logprobs_of_trl_of_two_shapes(processor):
    for row in ([[-0.1], -0.2], [[-0.1], "x"], [[-0.1], [-0.2], [-0.3]], [[-0.1, -0.2], [-0.1]]):
        with pytest.raises(ArgumentError, match=LINE):
            of_trl({**TRL, "logprobs": [row]}, processor)
    with pytest.raises(ArgumentError, match=LINE):
        of_trl({**TRL, "logprobs": [[[-1], [-2]]], "logprob_token_ids": {"a": 1}}, processor)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["token_ids", "logprobs", "tool_calls", "finish_reason"])
def test_chat(processor, name, value):
    if name == "logprobs" and isinstance(value, dict):
        return  # OpenAI's object without content: there are no logprobs
    log = with_value(CHAT, (1, name), value)
    with pytest.raises(ArgumentError, match=LINE):
        from_chat(log, processor, trajectory_id="e", group_id="g")


def test_chat_that_no_encoding_holds(processor):
    for log in (
        with_value(CHAT, (0, "content"), "\ud800"),
        [CHAT[0], {**CHAT[1], "content": "\ud800"}],
    ):
        log[1].pop("token_ids", None), log[1].pop("logprobs", None)
        with pytest.raises(ArgumentError, match="lone surrogate"):
            from_chat(log, processor, trajectory_id="e", group_id="g")


def test_deep_arguments_in_a_chat(processor):
    deep = '{"a":' * 900 + "1" + "}" * 900
    calls = [{"type": "function", "function": {"name": "f", "arguments": deep}}]
    log = [*CHAT, {"role": "user", "content": "On."}, {"role": "assistant", "content": "b"}]
    log[1] = {**log[1], "tool_calls": calls}
    try:
        from_chat(log, processor, trajectory_id="e", group_id="g")
    except ArgumentError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", [*WRONG, [1], ["x"]], ids=lambda value: type(value).__name__)
def test_calls(processor, value):
    path = ("choices", 0, "logprobs", "content")
    with pytest.raises(ArgumentError, match=LINE):
        from_calls([with_value(CALL, path, value)], processor, trajectory_id="e", group_id="g")


@pytest.mark.parametrize("token", ["token_id:" + "9" * 5000, "token_id:٣", "token_id:-1", 5, None])
def test_tokens_of_calls_that_name_no_id(processor, token):
    """Such an answer is rendered, and marked."""
    call = with_value(CALL, ("choices", 0, "logprobs", "content", 0, "token"), token)
    made = from_calls([call], processor, trajectory_id="e", group_id="g")
    assert made.turns[0].metadata["reencoded"] == ["response"]


@pytest.mark.parametrize("name", ["metadata", "sampling", "processor"])
def test_fields_of_a_trajectory(name):
    for value in (*WRONG[:-1], *([None] if name == "metadata" else [])):
        with pytest.raises(ArgumentError, match=f"Trajectory: {name} is "):
            Trajectory("e", "g", "qwen2_5_vl", [], **{name: value})


def test_a_point_without_axes():
    with pytest.raises(ValueError, match=LINE):
        read_action({"kind": "click", "point": np.array(3)})
