"""SkyRL's GeneratorOutput, flat and step by step, as trajectories."""

import dataclasses

import numpy as np
import pytest
from support.recorded_trees import drawn, processor, skyrl_output, turn_of

import mmpack as mp
from mmpack.adapters.skyrl import to_trajectories
from mmpack.errors import ArgumentError
from mmpack.schema.spans import Score
from mmpack.trajectory import to_samples as samples_of
from mmpack.trajectory import trajectory_groups


@dataclasses.dataclass
class TrajectoryID:
    """As skyrl/train/generators/base.py has it."""

    instance_id: str
    repetition_id: int


def test_step_wise_rows_of_several_episodes():
    turns = [turn_of(([1, 2], []), [3, 4], 0), turn_of(([1, 2, 3, 4, 5], []), [6], 1)]
    output = skyrl_output([turns, turns[:1]])
    made = to_trajectories(output, processor(), policy_versions=["v3"] * 3)
    assert [(t.trajectory_id, t.group_id) for t in made] == [("task_0", "task"), ("task_1", "task")]
    assert [len(t.turns) for t in made] == [2, 1]
    assert [t.rewards for t in made] == [[Score("reward", 1.0)]] * 2
    assert {v.version for e in made for t in e.turns for v in t.policy_versions} == {"v3"}


def flat(**fields):
    return {
        "prompt_token_ids": [[1, 2], [1, 2]],
        "response_ids": [[3, 4, 9, 5], [6, 7]],
        "loss_masks": [[1, 1, 0, 1], [1, 1]],
        "rewards": [1.0, 0.0],
        "rollout_logprobs": [[-1.0, -2.0, 0.0, -3.0], [-0.5, -0.25]],
        "stop_reasons": ["stop", "length"],
        **fields,
    }


def test_flat_rows_are_episodes():
    made = to_trajectories(flat(env_metrics=[{"steps": 2}, {}]), processor())
    assert [[t.response_ids.tolist() for t in e.turns] for e in made] == [[[3, 4], [5]], [[6, 7]]]
    assert made[0].group_id == made[1].group_id and made[1].trajectory_id.endswith("/1")
    assert [e.rewards for e in made] == [[Score("reward", 1.0)], [Score("reward", 0.0)]]
    assert [e.turns[-1].finish_reason for e in made] == ["stop", "length"]
    about = {"stop_reason": "stop", "env_metrics": {"steps": 2}}
    assert made[0].turns[-1].metadata["skyrl"] == about
    assert mp.validate([s for e in made for s in samples_of(e)]) == []
    named = to_trajectories(flat(trajectory_ids=TWO), processor())
    assert [(e.trajectory_id, e.group_id) for e in named] == [("a_0", "a"), ("b_0", "b")]
    # the same name twice: numbered
    named = to_trajectories(flat(trajectory_ids=[TrajectoryID("a", 0)] * 2), processor())
    assert [e.trajectory_id for e in named] == ["a/0", "a/1"]


def test_rewards_of_tokens_and_of_steps():
    """SkyRL's trainer takes the last step's alone; the others keep their name."""
    given = flat(rewards=[[0.0, 0.5, 0.25, 1.0], [0.0, 0.0]])
    first, second = to_trajectories(given, processor())
    assert [(s.name, s.scope, s.value) for t in first.turns for s in t.rewards] == [
        ("reward", {"span": [3, 4]}, 0.5),
        ("reward", "sequence", 0.25),  # of the observation behind it
        ("reward", {"span": [5, 6]}, 1.0),
    ]
    assert second.turns[0].rewards is None
    steps = flat(rewards=[0.25, 1.0], is_last_step=[False, True])
    steps["prompt_token_ids"] = [[1, 2], [1, 2, 3, 4, 9, 5, 8]]
    (episode,) = to_trajectories(steps, processor())
    weights = {"reward": 1.0, "step_reward": 0.0}
    for given, total in ((None, 1.25), (weights, 1.0)):
        found = trajectory_groups(samples_of(episode), weights=given)
        assert found.rewards.tolist() == [total]
    steps["rewards"] = [[0.0, 0.25, 0.0, 0.0], [0.0, 1.0]]
    (episode,) = to_trajectories(steps, processor())
    names = [[s.name for s in t.rewards or ()] for t in episode.turns]
    assert names == [["step_reward"], [], ["reward"]]


def test_an_appended_end_filtered_rows_and_pixels():
    """A stop string's end token has mask 0, and a row that was too long has no mask at all."""
    first, second = to_trajectories(flat(loss_masks=[[1, 1, 0, 0], [0, 0]]), processor())
    assert [t.response_ids.tolist() for t in first.turns] == [[3, 4]]
    (turn,) = second.turns
    assert turn.response_ids.tolist() == [6, 7] and turn.loss_spans == []
    shot = processor().medium(drawn(0))
    prompt = [1, 151652, *[151655] * shot.num_tokens, 151653]
    grids = [np.array([shot.grid_thw]), None]
    given = flat(prompt_token_ids=[prompt, [1, 2]], image_grid_thw=grids)
    given["pixel_values"] = [shot.pixel_values, None]
    first, _ = to_trajectories(given, processor())
    assert np.array_equal(first.turns[0].media[0].pixel_values, shot.pixel_values)
    first, _ = to_trajectories(given, processor(), images=[[drawn(0)], None])
    assert first.turns[0].media[0].cache_key == shot.cache_key


TWO = [TrajectoryID("a", 0), TrajectoryID("b", 0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (flat(rewards=None), "output has no rewards"),
        (flat(rewards=[1.0]), "rewards has 1 entries for 2 rows"),
        (flat(rewards=["1", 0.0]), "rewards is of type str"),
        (flat(response_ids=3), "response_ids is of type int"),
        (flat(loss_masks=[[1], [1]]), "mask has shape"),
        (flat(is_last_step=[True, False]), "rows 1 to 1 have no last step"),
        (flat(is_last_step=[False, True], trajectory_ids=TWO), "have several trajectory_ids"),
        (flat(rollout_expert_indices=[[1], [1]]), "values is"),
        ([], "output is of type list"),
    ],
)
def test_what_can_t_be_read_is_refused(given, message):
    with pytest.raises(ArgumentError, match=rf"{message}.*Fix: "):
        to_trajectories(given, processor())
    with pytest.raises(ArgumentError, match="images has 1 entries"):
        to_trajectories(flat(), processor(), images=[[]])
