"""One reward and one advantage per trajectory, whatever number of samples it makes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import episode, grown

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.spans import Score
from mmpack.trajectory import group_index, to_samples, trajectory_groups, trajectory_index


def made(counts, merge=False):
    """Episodes of as many turns as `counts` say, two tasks in turn, each with a reward of its own."""
    samples = []
    for e, count in enumerate(counts):
        turns = grown(count, seed=e)
        turns[0].rewards = [Score("format", 0.25)]
        trajectory = episode(turns, f"e{e}", rewards=[Score("task", float(e))])
        trajectory.group_id = f"task{e % 2}"
        samples += to_samples(trajectory, merge=merge)
    return samples


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:group_advantages")  # a task of one episode
def test_a_trajectory_counts_once_whatever_its_samples(counts, random):
    """Oracle: mean and deviation over a dict of episodes, in numpy, with ddof 1 as GRPO has it."""
    many, one = made(counts), made(counts, merge=True)
    random.shuffle(many)
    per_sample = []
    for samples in (many, one):
        groups = trajectory_groups(samples)
        advantages = mp.group_advantages(
            torch.tensor(groups.rewards), torch.tensor(groups.group_index), kind="dr_grpo"
        )
        per_sample.append(advantages[groups.trajectory_index])
    rewards = {f"e{e}": e + 0.25 for e in range(len(counts))}
    for samples, found in zip((many, one), per_sample, strict=True):
        for sample, value in zip(samples, found.tolist(), strict=True):
            peers = [
                r for name, r in rewards.items() if int(name[1:]) % 2 == int(sample.group_id[-1])
            ]
            assert value == pytest.approx(rewards[sample.trajectory_id] - np.mean(peers), abs=1e-6)


def test_by_step_each_step_is_compared_with_the_same_step_of_others():
    samples = made([3, 1, 2])
    assert [(s.trajectory_id, s.turn) for s in samples] == [
        ("e0", 0), ("e0", 1), ("e0", 2), ("e1", 0), ("e2", 0), ("e2", 1),
    ]  # fmt: skip
    assert group_index(samples).tolist() == [0, 0, 0, 1, 0, 0]
    assert group_index(samples, by="step").tolist() == [0, 1, 2, 3, 0, 1]
    assert trajectory_index(samples).tolist() == [0, 0, 0, 1, 2, 2]
    with pytest.raises(ArgumentError, match=r"'e0/0' holds 3 turns.*merge=False"):
        group_index(made([3], merge=True), by="step")


def test_samples_without_a_trajectory_are_one_each():
    samples = made([1, 1])
    for sample in samples:
        sample.trajectory_id = None
    groups = trajectory_groups(samples, {"task": 2.0})
    assert groups.trajectory_ids == ["e0/0", "e1/0"] and groups.rewards.tolist() == [0.0, 2.0]
    assert trajectory_index([]).tolist() == [] and len(trajectory_groups([])) == 0
