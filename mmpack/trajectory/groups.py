"""Statistics of groups over trajectories: a trajectory counts once, whatever number of samples it makes. B samples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.spans import Score
from mmpack.schema.turns import span_turns

BY = ("trajectory", "step")


@dataclass(frozen=True, eq=False)
class TrajectoryGroups:
    """J trajectories of B samples. `x[trajectory_index]` gives what each trajectory has to its samples."""

    trajectory_ids: list[str]  # [J]
    trajectory_index: np.ndarray  # int64 [B]
    group_index: np.ndarray  # int64 [J]
    rewards: np.ndarray  # float64 [J]: every score of the trajectory once, weighted

    def __len__(self) -> int:
        """J."""
        return len(self.trajectory_ids)


def trajectory_index(samples: Sequence[Sample]) -> np.ndarray:
    """int64 [B]: the trajectory of each sample, numbered in order of first appearance; one without an id is its own.

    Raises: ArgumentError for a trajectory in two groups: an id that two episodes share.

    Example:
        >>> from mmpack.trajectory import Trajectory, Turn, to_samples, trajectory_index
        >>> turns = [Turn([1], [2]), Turn([3], [4])]
        >>> episodes = [Trajectory(name, "task", "qwen2_5_vl", turns) for name in "ab"]
        >>> trajectory_index([s for e in episodes for s in to_samples(e)]).tolist()
        [0, 0, 1, 1]
    """
    samples = as_samples(samples, "trajectory_index")
    groups: dict[str, str] = {}
    for sample in samples:
        name = sample.trajectory_id
        if name is not None and groups.setdefault(name, sample.group_id) != sample.group_id:
            raise ArgumentError(
                f"trajectory_index: trajectory {name!r:.60} is in the groups {groups[name]!r:.40} and "
                f"{sample.group_id!r:.40}. Fix: give each episode its own trajectory_id"
            )
    return _numbered([_unit(s, i) for i, s in enumerate(samples)])


def group_index(samples: Sequence[Sample], by: str = "trajectory") -> np.ndarray:
    """int64 [B]: the group that each sample is compared in, numbered in order of first appearance.

    Args:
        by: "trajectory": samples of one `group_id`; count each trajectory once, by `trajectory_index`. "step": samples
            of one `group_id` and one turn, each of which is a step: step k is compared with the others' step k.

    Raises: ArgumentError; by="step" also for a sample of several turns.
    """
    samples = as_samples(samples, "group_index")
    check_name("group_index", "by", by, BY)
    trajectory_index(samples)
    if by == "trajectory":
        return _numbered([s.group_id for s in samples])
    return _numbered([(s.group_id, _step(s)) for s in samples])


def trajectory_groups(
    samples: Sequence[Sample], weights: Mapping[str, float] | None = None
) -> TrajectoryGroups:
    """Return one reward and one group per trajectory, and the index of each sample's trajectory.

    Args:
        weights: name of a score -> its weight; a name that is not in it counts 0. None: 1 each. A name that no reward
            bears is an error where rewards are left out: it may be misspelt. Rewards only, of every scope; costs and
            verifiers never enter.

    Raises: ArgumentError, also for a reward that is no finite number.

    Example: one advantage per trajectory, whatever number of samples it makes.
        >>> import mmpack as mp, torch
        >>> from mmpack.trajectory import Trajectory, Turn, to_samples, trajectory_groups
        >>> turns = [Turn([1], [2]), Turn([3], [4])]
        >>> samples = []
        >>> for name, reward in [("a", 1.0), ("b", 0.0)]:
        ...     score = [mp.Score("task", reward)]
        ...     samples += to_samples(Trajectory(name, "t", "qwen2_5_vl", turns, rewards=score))
        >>> groups = trajectory_groups(samples)
        >>> groups.rewards.tolist(), groups.group_index.tolist()
        ([1.0, 0.0], [0, 0])
        >>> per_trajectory = mp.group_advantages(
        ...     torch.tensor(groups.rewards), torch.tensor(groups.group_index), kind="dr_grpo"
        ... )
        >>> per_trajectory[groups.trajectory_index].tolist()
        [0.5, 0.5, -0.5, -0.5]
    """
    samples = as_samples(samples, "trajectory_groups")
    _check_weights(weights)
    index = trajectory_index(samples)
    names: list[str] = []
    groups: list[str] = []
    _check_rewards(samples, weights)
    rewards = np.zeros(int(index.max()) + 1 if len(index) else 0)
    for sample, j in zip(samples, index.tolist(), strict=True):
        if j == len(names):
            own = sample.trajectory_id
            names.append(sample.sample_id if own is None else own)
            groups.append(sample.group_id)
        for score in sample.rewards or ():
            weight = 1.0 if weights is None else weights.get(score.name, 0.0)
            rewards[j] += score.value * weight
    return TrajectoryGroups(names, index, _numbered(groups), rewards)


def _unit(sample: Sample, place: int) -> Hashable:
    return ("sample", place) if sample.trajectory_id is None else sample.trajectory_id


def _step(sample: Sample) -> int:
    turns = set(span_turns(sample)) or {sample.turn}
    if len(turns) > 1:
        raise ArgumentError(
            f"group_index: {sample.sample_id!r:.60} holds {len(turns)} turns, but a step is one turn. "
            "Fix: make samples by to_samples(…, merge=False)"
        )
    (turn,) = turns
    if turn is None:
        raise ArgumentError(
            f"group_index: {sample.sample_id!r:.60} has no turn. Fix: set Sample.turn"
        )
    return turn


def _check_weights(weights: Mapping[str, float] | None) -> None:
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"trajectory_groups: weights is {kind_of(weights)}, expected names and weights. "
            f"Fix: pass a dict such as {{'task': 1.0}}"
        )
    for name, weight in weights.items():
        check_number("trajectory_groups", f"weights[{name!r:.40}]", weight)


def _check_rewards(samples: Sequence[Sample], weights: Mapping[str, float] | None) -> None:
    there: set[str] = set()
    for sample in samples:
        for i, score in enumerate(sample.rewards or ()):
            whose = f"of {sample.sample_id!r:.60}"
            if not isinstance(score, Score):
                raise ArgumentError(
                    f"trajectory_groups: rewards[{i}] {whose} is {kind_of(score)}, expected Score. "
                    "Fix: keep costs in Sample.costs"
                )
            where = f"reward {score.name!r:.40} {whose}"
            check_number("trajectory_groups", where, score.value, fix="leave the score out")
            there.add(score.name)
    if weights is None:
        return
    missing = sorted(weights.keys() - there, key=repr)
    left_out = ", ".join(sorted(map(repr, there - weights.keys())))
    if left_out and (missing or not weights):
        raise ArgumentError(
            f"trajectory_groups: weights name {', '.join(map(repr, missing)) or 'nothing'}, which no reward "
            f"has, and leave out {left_out}. Fix: use the rewards' own names, with weight 0 for those to leave out"
        )


def _numbered(keys: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
