"""Leave-one-out std, GDPO, pass@k and units against loops over the groups and all groups of k."""

import itertools
import statistics

import numpy as np
import pytest
import torch

import mmpack as mp

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def batch(seed, values=None):
    g = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 5, (24,), generator=g)
    if values is None:
        return torch.randn(24, generator=g), groups
    return torch.tensor(values)[torch.randint(0, len(values), (24,), generator=g)], groups


def members(groups, b):
    return [i for i in range(len(groups)) if groups[i] == groups[b]]


@pytest.mark.parametrize("values", [None, [0.0, 1.0], [0.1]])
@pytest.mark.parametrize("seed", range(5))
def test_leave_one_out(seed, values):
    rewards, groups = batch(seed, values)
    want = []
    for b in range(24):
        others = [float(rewards[i]) for i in members(groups, b) if i != b]
        distance = float(rewards[b]) - statistics.mean(others) if others else 0.0
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        want.append(distance / (std + 1e-6) if std else distance)
    got = mp.group_advantages(rewards, groups, "loo_std")
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("values", [None, [0.0, 1.0], [0.3]])
@pytest.mark.parametrize("seed", range(3))
def test_best_of_k_by_all_groups_of_k(seed, values, k):
    rewards, groups = batch(seed, values)
    want = []
    for b in range(24):
        mine = members(groups, b)
        best = {c: max(float(rewards[i]) for i in c) for c in itertools.combinations(mine, k)}
        std = np.std(list(best.values())) if len(best) > 1 else 0.0
        with_it = [value for chosen, value in best.items() if b in chosen]
        mean = np.mean(list(best.values())) if best else 0.0
        want.append((np.mean(with_it) - mean) / (std + 1e-6) if std > 1e-12 else 0.0)
    got = mp.group_advantages(rewards, groups, "pass_at_k", k=k)
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), **CLOSE)


def test_gdpo_against_trls_steps():
    from trl.trainer.utils import nanstd

    rewards = torch.randn(24, 2, generator=torch.Generator().manual_seed(0)).double()
    grouped = rewards.view(4, 6, 2)
    normal = (grouped - grouped.mean(1, keepdim=True)) / (
        nanstd(grouped, dim=1, keepdim=True) + 1e-4
    )
    total = normal.view(24, 2) @ torch.tensor([1.0, 0.25]).double()
    want = (total - total.mean()) / (nanstd(total) + 1e-4)
    named = {"a": rewards[:, 0], "b": rewards[:, 1]}
    groups = torch.arange(4).repeat_interleave(6)
    got = mp.group_advantages(named, groups, "gdpo", 1e-4, weights={"a": 1.0, "b": 0.25})
    torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "loo_std", "dr_grpo", "lite_ppo", "reinforce_pp"])
def test_samples_of_one_unit_count_once(kind):
    rewards, groups = batch(0)
    repeats = torch.arange(24) % 3 + 1
    unit = torch.arange(24).repeat_interleave(repeats) * 7 - 9
    order = torch.randperm(len(unit), generator=torch.Generator().manual_seed(1))
    inverse = ((unit + 9) // 7)[order]
    got = mp.group_advantages(rewards[inverse], groups[inverse], kind, unit_index=unit[order])
    torch.testing.assert_close(got, mp.group_advantages(rewards, groups, kind)[inverse], **CLOSE)
    by_sample = mp.group_advantages(rewards[inverse], groups[inverse], kind)
    assert (by_sample - got).abs().max() > 1e-3
    unlike = rewards[inverse].clone()
    unlike[-1] += 1
    with pytest.raises(mp.ArgumentError, match=r"rewards\[\d+\] is .* of one unit. Fix: "):
        mp.group_advantages(unlike, inverse * 0, kind, unit_index=inverse * 0)


@pytest.mark.parametrize("kind", ["loo_std", "gdpo", "pass_at_k"])
def test_no_samples_and_equal_ones(kind):
    k = {"k": 2} if kind == "pass_at_k" else {}
    for count in (0, 5):
        rewards = torch.full((count,), 0.1)
        given = {"a": rewards, "b": rewards} if kind == "gdpo" else rewards
        got = mp.group_advantages(given, torch.zeros(count).long(), kind, eps=0.0, **k)
        assert torch.equal(got, torch.zeros(count))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"kind": "gdpo"}, "rewards is of type Tensor and kind is 'gdpo'"),
        ({"rewards": {"a": torch.ones(3)}}, "rewards is of type dict and kind is 'grpo'"),
        ({"kind": "pass_at_k"}, "k is None, expected a whole number"),
        ({"k": 2}, "k is given, but kind is 'grpo'"),
        ({"weights": {"a": 1.0}}, "weights is ['a'] for kind 'grpo'"),
        ({"unit_index": torch.zeros(3)}, "unit_index has shape [3] and dtype torch.float32"),
        ({"unit_index": [0, 1, 2]}, "unit_index is of type list, expected a tensor"),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    given = {"rewards": torch.ones(3), "group_index": torch.zeros(3).long()} | keywords
    with pytest.raises(mp.ArgumentError) as error:
        mp.group_advantages(**given)
    assert says in str(error.value) and "Fix: " in str(error.value)
