"""Sessions of verl's gateway (uni-agent): chains as rows, teachers, routes and versions, without verl."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.recorded_trees import processor, said, turn_of, verl_rows

import mmpack as mp
from mmpack.adapters.verl import to_trajectories
from mmpack.errors import ArgumentError
from mmpack.schema.spans import Score
from mmpack.trajectory import branches
from mmpack.trajectory import to_samples as samples_of


@dataclasses.dataclass
class Trajectory:
    """The fields of uni_agent/gateway/session/types.py."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward_score: float | None = None
    num_turns: int = 0
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    extra_fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def test_a_session():
    turns = [turn_of(([1, 2], []), [3, 4], 0), turn_of(([1, 2], []), [6], 1)]
    rows = verl_rows(turns)
    episodes = to_trajectories([rows, [Trajectory(**row) for row in rows]], processor())
    assert said(episodes[0].turns) == said(episodes[1].turns) == said(turns)
    assert [e.rewards for e in episodes] == [[Score("reward", 0.5)]] * 2
    for turn in episodes[0].turns:
        assert [(v.start, v.stop, v.version) for v in turn.policy_versions] == [(2, len(turn), "3")]


def row(**fields):
    return {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_mask": [1, 0, 1],
        **fields,
    }


def test_an_answer_that_the_client_rewrote():
    """The gateway encodes the whole conversation anew: a chain of its own, which says where it parts."""
    again = row(prompt_ids=[1, 2, 33, 4], response_ids=[6], response_mask=[1])
    (episode,) = to_trajectories([[row(), again]], processor())
    assert [b.kind for b in branches(episode)] == ["first", "goes_on", "rewritten"]
    found = episode.turns[2].metadata["parts"]
    assert (found["position"], found["answer"]) == (2, [0, 0])
    assert len(samples_of(episode)) == 2


def test_versions_lists_and_rewards():
    """Versions that differ within a row are not guessed; lists stay with their turns."""
    lists = {"kept_ids": [[9, 3], [], [4]], "min_global_steps": 3, "max_global_steps": 4}
    given = row(response_ids=[3, 8, 4], extra_fields=lists, reward_score=0.25)
    (episode,) = to_trajectories([given | {"reward_info": {"reward": 1.0}}], processor())
    assert [t.policy_versions for t in episode.turns] == [None, None]
    assert episode.metadata["verl"][0]["extra_fields.max_global_steps"] == 4
    assert episode.rewards == [Score("reward_score", 0.25)]
    assert episode.metadata["verl"][0]["reward_info"] == {"reward": 1.0}
    (sample,) = samples_of(episode)
    assert sample.kept_ids == mp.schema.Ragged.of([[3, 9], [4]]) and mp.validate(sample) == []
    (episode,) = to_trajectories([row(reward_info={"finished": False})], processor())
    assert episode.rewards is None


TEACHER = {"teacher_ids": [[1]], "teacher_logprobs": [[-1.0]]}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([row(reward_info=3)], {}, "reward_info is of type int"),
        ([row(reward_info={"reward": "x"})], {}, "reward is of type str"),
        ([row(extra_fields=TEACHER)], {}, r"teacher_ids is \[1, 1\] .* expected \[5, K\]"),
        ([row(extra_fields={"kept_ids": [[3]]})], {}, "kept_ids has 1 lists for"),
        ([row(routed_experts=np.zeros((2, 1, 1), int))], {}, "routed_experts end at token 2"),
        ([row(multi_modal_data={"videos": [1]})], {}, "has videos"),
        ([row(multi_modal_data={"audios": [1]})], {}, "has audios"),
        ([row(response_mask=[1])], {}, "mask has shape"),
        ([row(response_ids=None)], {}, "has no response_ids"),
        ([None], {}, "is None"),
        ([[]], {}, "is empty"),
        (row(), {}, "expected a list"),
        ([row()], {"group_ids": ["a", "b"]}, "group_ids has 2 entries"),
        ([[row(), row()]], {"media": [[]]}, "has 2 outputs"),
    ],
)
def test_what_can_t_be_read_is_refused(given, options, message):
    with pytest.raises(ArgumentError, match=rf"{message}.*Fix: "):
        to_trajectories(given, processor(), **options)
