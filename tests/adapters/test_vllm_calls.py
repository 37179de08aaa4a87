"""Calls to vLLM's server as trajectories: JSON by its protocol, chat completions, completions, its own classes."""

import base64
import copy
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from support.recorded_trees import (
    chains,
    drawn,
    npy,
    parents,
    processor,
    routes_of,
    said,
    trees,
    versions,
    vllm_calls,
)
from support.trajectories import scored_of_samples, scored_of_turns

import mmpack as mp
from mmpack.adapters.vllm import to_trajectories
from mmpack.errors import ArgumentError
from mmpack.trajectory import branches
from mmpack.trajectory import to_samples as samples_of

IMAGE = 151655
RECORDED = sorted((Path(__file__).parents[2] / "fixtures" / "vllm").glob("*.json"))


def media_of(turns):
    return {m.cache_key: m for t in turns for m in t.media}


def assert_same(episode, turns):
    assert said(episode.turns) == said(turns)
    assert [b.parent for b in branches(episode)] == parents(turns)
    for turn, told in zip(episode.turns, turns, strict=True):
        assert versions(turn) == versions(told)
        assert turn.kept_ids == told.kept_ids and turn.finish_reason == "stop"
        assert np.array_equal(turn.routed_experts[:-1], told.routed_experts[:-1])
    samples = samples_of(episode)
    assert len(samples) == len(chains(turns)) and mp.validate(samples) == []
    assert scored_of_samples(samples) == scored_of_turns(turns)


@settings(deadline=None, max_examples=30)
@given(trees())
def test_calls_come_back_as_they_were(turns):
    (episode,) = to_trajectories([vllm_calls(turns)], processor(), media=media_of(turns))
    assert_same(episode, turns)
    assert episode.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "logprobs": "raw"}


@pytest.mark.engine
@settings(deadline=None, max_examples=10)
@given(trees())
def test_vllm_s_own_classes(turns):
    """The same JSON through vLLM's request and response, as objects and as it writes them."""
    from mmpack.adapters.vllm.versions import protocol_class

    request_class, response_class = (
        protocol_class(name, "test") for name in ("GenerateRequest", "GenerateTokensResponse")
    )
    if response_class.__name__ != "GenerateTokensResponse":
        pytest.skip("these are calls of 0.32; fixtures/vllm has those of older versions")
    calls = []
    for call in vllm_calls(turns):
        request = dict(call["request"])
        if not request["features"]["mm_hashes"]["image"]:
            del request["features"]
        calls.append(
            {
                "request": request_class.model_validate(request),
                "response": response_class.model_validate(call["response"]),
            }
        )
    as_json = [{k: v.model_dump(mode="json") for k, v in call.items()} for call in calls]
    for form in (calls, as_json):
        (episode,) = to_trajectories([form], processor(), media=media_of(turns))
        assert_same(episode, turns)
    from vllm.utils.serial_utils import numpy2base64  # since 0.28

    assert npy(routes_of([1, 2])) == numpy2base64(routes_of([1, 2]))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_calls_of_older_versions(path):
    calls = json.loads(path.read_text(encoding="utf-8"))
    text, shown = to_trajectories(
        [[call] for call in calls],
        processor(),
        media=[[[]], [[drawn(0)]]],
        logprobs_mode="processed_logprobs",
    )
    assert [len(t.media) for t in (text.turns[0], shown.turns[0])] == [0, 1]
    for call, episode in zip(calls, (text, shown), strict=True):
        assert mp.validate(samples_of(episode)) == []
        for turn, choice in zip(episode.turns, call["response"]["choices"], strict=True):
            assert turn.context_ids.tolist() == call["request"]["token_ids"]
            assert turn.response_ids.tolist() == choice["token_ids"]
            said = [step["logprob"] for step in choice["logprobs"]["content"]]
            assert turn.logprobs.tolist() == pytest.approx(said, abs=1e-6)
            assert turn.policy_versions is None and turn.finish_reason == "length"


def chat(prompt, choices, messages, **request):
    return {
        "request": {"messages": messages, "temperature": 1.0, **request},
        "response": {"id": "chatcmpl-1", "prompt_token_ids": prompt, "choices": choices},
    }


def test_a_chat_with_a_picture_and_two_answers():
    """Chat completions: logprobs as text, pictures as data: URLs of the messages, cached tokens of the usage."""
    with io.BytesIO() as buffer:
        drawn(0).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    shot = processor().medium(drawn(0))
    prompt = [1, 151652, *[IMAGE] * shot.num_tokens, 151653]
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    logprobs = {
        "content": [{"token": "token_id:5", "logprob": -0.5}, {"token": "b", "logprob": -1}]
    }
    choices = [
        {"index": 0, "token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "tool_calls"},
        {"index": 1, "token_ids": [7], "logprobs": None, "finish_reason": "length"},
    ]
    later = [*asked, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
    last = [*later, {"role": "assistant", "content": "z"}, {"role": "user", "content": "w"}]
    calls = [
        chat(prompt, choices, asked),
        chat([*prompt, 5, 6, 8], [{"token_ids": [9], "finish_reason": "stop"}], later),
        chat([*prompt, 5, 6, 8, 9, 10], [{"token_ids": [11], "finish_reason": "stop"}], last),
    ]
    calls[1]["response"]["usage"] = {"prompt_tokens_details": {"cached_tokens": 3}}
    (episode,) = to_trajectories([calls], processor(), logprobs_mode="processed_logprobs")
    assert [(b.kind, b.parent) for b in branches(episode)] == [
        ("first", None),
        ("sibling", None),
        ("goes_on", 0),
        ("goes_on", 2),
    ]
    turns = [(t.media[0].cache_key, t.finish_reason, t.source) for t in episode.turns]
    told = (("tool", "user"), ("length", "user"), ("stop", "tool"), ("stop", "user"))
    assert turns == [(shot.cache_key, *of) for of in told]
    assert episode.turns[0].logprobs.tolist() == [-0.5, -1.0]
    assert episode.turns[2].prefix_cached_tokens == 3
    assert episode.sampling == {"temperature": 1.0, "logprobs": "processed"}
    assert episode.turns[1].metadata["vllm"] == {"request_id": "chatcmpl-1", "index": 1}
    by_url = copy.deepcopy(calls)
    for call in by_url:
        call["request"]["messages"][0]["content"][0]["image_url"]["url"] = "https://a/b.png"
    for media in ({"https://a/b.png": drawn(0)}, [[[drawn(0)]] * 3]):
        (other,) = to_trajectories([by_url], processor(), media=media)
        assert said(other.turns) == said(episode.turns)


def test_completions():
    choice = {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]},
        "finish_reason": "stop",
    }
    call = {"request": {"prompt": "a b", "top_p": 0.5}, "response": {"choices": [choice]}}
    (episode,) = to_trajectories([[call]], processor())
    assert episode.turns[0].logprobs.tolist() == [-0.5, -0.25]
    assert episode.group_id.startswith("prompt:") and episode.trajectory_id.endswith("/0")
    # the ids that were sent, where the server returned none
    sent = {"request": {"token_ids": [1, 2]}, "response": {"choices": [{"token_ids": [3]}]}}
    assert to_trajectories([[sent]], processor())[0].turns[0].context_ids.tolist() == [1, 2]


def test_the_cached_part_of_routes_is_not_sent_twice():
    whole = [1, 2, 3, 4, 5, 6]
    first = call({"token_ids": whole[:2]}, routed_experts=npy(routes_of(whole)[:3]))
    start = {"routed_experts_prompt_start": 3}
    second = call(
        {"token_ids": whole[:5], "sampling_params": start},
        token_ids=[6],
        routed_experts=npy(routes_of(whole)[3:5]),
    )
    (sample,) = samples_of(to_trajectories([[first, second]], processor())[0])
    assert np.array_equal(sample.routed_experts[:5], routes_of(whole)[:5])


def test_settings_that_differ_among_calls():
    calls = [call({"temperature": t}) for t in (0.5, 1.0)]
    (episode,) = to_trajectories([calls], processor())
    assert episode.sampling is None
    assert episode.metadata["vllm"] == {"sampling": [{"temperature": 0.5}, {"temperature": 1.0}]}
    (episode,) = to_trajectories([calls], processor(), sampling={"temperature": 1.0})
    assert episode.sampling == {"temperature": 1.0}


FEATURES = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 0}]}}


def call(request=None, **choice):
    given = {"token_ids": [3, 4], **choice}
    return {"request": {"token_ids": [1], **(request or {})}, "response": {"choices": [given]}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has no request and response"),
        ({"request": {}, "response": {}}, "has no choices"),
        (call(token_ids=None), "has no token_ids. Fix: ask for return_token_ids=True"),
        ({"request": {}, "response": {"choices": [{"token_ids": [1]}]}}, "has no prompt_token_ids"),
        (call(finish_reason="done"), "finish_reason 'done'"),
        (call(logprobs={"content": [{"logprob": -1.0}]}), "has 2 token_ids and 1 logprobs"),
        (
            call(logprobs={"content": [{"token_id": i, "logprob": -1} for i in (3, 5)]}),
            r"logprobs.content\[1\] is of token 5, token_ids has 4",
        ),
        (call(logprobs=[-1.0]), "logprobs is of shape"),
        (call(routed_experts="x"), "not base64 of a .npy file"),
        (call(sampling_mask=[[3]]), "kept_ids has 1 lists"),
        (call(weight_versions=[{"version": "1", "start": 0, "end": 3}]), "of 2 response ids"),
        (call({"features": FEATURES}), "no medium has the name 'h'"),
    ],
)
def test_what_can_t_be_read_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        to_trajectories([[given]], processor())
    assert "Fix: " in str(caught.value) and "\n" not in str(caught.value)


def test_arguments():
    with pytest.raises(ArgumentError, match=r"episodes\[0\] is of type dict"):
        to_trajectories([call()], processor())
    with pytest.raises(ArgumentError, match="logprobs_mode is 'raw_logits'"):
        to_trajectories([[call()]], processor(), logprobs_mode="raw_logits")
    with pytest.raises(ArgumentError, match="has 1 calls, but media for 0"):
        to_trajectories([[call()]], processor(), media=[[]])
