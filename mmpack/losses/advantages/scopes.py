"""Advantages of single scores: of turns, regions and spans compared with their like in the group."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.advantages.group import WithinGroup, group_advantages
from mmpack.losses.listed import listed
from mmpack.schema.spans import Score

Within = Literal["kind", "scope"]


def score_advantages(
    scores: Sequence[Sequence[Score]],
    group_index: Any,
    kind: WithinGroup = "grpo",
    eps: float = 1e-6,
    *,
    within: Within = "kind",
) -> list[list[Score]]:
    """Each score's advantage in its place: B lists of Score, for `mp.scatter_rewards(batch, …, at="all")`.

    A score is compared with those of its group that bear its name and have a scope of its kind ("kind": all regions
    with all regions), or its very scope ("scope": region 0 with region 0, turn 2 with turn 2). A score without its
    like gets 0. What a sample lacks is compared with nothing.

    Args: scores: B lists, as `batch.rewards`. group_index: [B] int. kind, eps: as in `mp.group_advantages`. Raises
    ArgumentError for values that are not finite and what is no Score.

    Example: boxes of two samples of one prompt.
        >>> import mmpack as mp
        >>> near, far = mp.Score("iou", 0.75, {"region": 0}), mp.Score("iou", 0.25, {"region": 0})
        >>> [[one.value for one in of] for of in mp.losses.score_advantages([[near], [far]], [0, 0], "dr_grpo")]
        [[0.25], [-0.25]]
    """
    what = "score_advantages"
    check_name(what, "kind", kind, get_args(WithinGroup))
    check_name(what, "within", within, get_args(Within))
    check_number(what, "eps", eps, least=0)
    groups = listed(what, "group_index", group_index, "iu", "integers", "pass batch.group_index")
    sequence = isinstance(scores, Sequence) and not isinstance(scores, (str, bytes))
    if not sequence or len(scores) != len(groups):
        found = f"{len(scores)} lists" if sequence else kind_of(scores)
        raise ArgumentError(
            f"{what}: scores is {found} for a group_index of {len(groups)}. Fix: pass one list of Score per sample"
        )
    numbers: dict[tuple[int, str, str], int] = {}
    values, keys = [], []
    lists = [one if isinstance(one, Sequence) else [one] for one in scores]
    for b, (of_sample, group) in enumerate(zip(lists, groups, strict=True)):
        for k, score in enumerate(of_sample):
            if not isinstance(score, Score):
                raise ArgumentError(
                    f"{what}: scores[{b}][{k}] is {kind_of(score)}, expected a Score. Fix: pass B lists of Score"
                )
            check_number(what, f"scores[{b}][{k}].value", score.value, fix="leave the score out")
            if abs(score.value) > torch.finfo(torch.float32).max:
                raise ArgumentError(
                    f"{what}: scores[{b}][{k}].value is {score.value:g}, which float32 can't hold. Fix: scale it down"
                )
            like = _like(score.scope, within)
            keys.append(numbers.setdefault((group, score.name, like), len(numbers)))
            values.append(float(score.value))
    found_keys = torch.tensor(keys, dtype=torch.int64)
    rewards = torch.tensor(values, dtype=torch.float64)
    made = iter(group_advantages(rewards, found_keys, kind, eps, check=False).tolist())
    return [[dataclasses.replace(s, value=next(made)) for s in of_sample] for of_sample in lists]


def _like(scope: Any, within: str) -> str:
    """Scores with one of these are compared."""
    if isinstance(scope, dict) and within == "kind":
        return json.dumps(sorted(scope))
    return json.dumps(scope, sort_keys=True, default=repr)
