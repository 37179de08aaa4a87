"""Statistics of groups of any sizes, against float64 by their definitions; rewards of 0 and 1 by the closed form."""

import math
import statistics

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import mmpack as mp

EPS = 1e-6
NUMBERS = st.floats(-8, 8, width=16)
SAMPLES = st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 3)), min_size=1, max_size=12)
pytestmark = pytest.mark.filterwarnings("ignore:group_advantages. each of")


def split(samples):
    a, b, groups = zip(*samples, strict=True)
    return torch.tensor(a), torch.tensor(b), torch.tensor(groups)


def normal(values):
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    mean = statistics.fmean(values)
    return [(v - mean) / (std + EPS) if std else 0.0 for v in values]


def in_groups(values, groups):
    out = [0.0] * len(values)
    for group in set(groups):
        mine = [i for i, other in enumerate(groups) if other == group]
        for i, v in zip(mine, normal([values[i] for i in mine]), strict=True):
            out[i] = v
    return out


def close(got, want):
    torch.testing.assert_close(
        got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.sampled_from([1.0, 0.25, -2.0]))
def test_gdpo(samples, weight):
    a, b, groups = split(samples)
    parts = (in_groups(x.tolist(), groups.tolist()) for x in (a, b))
    total = [x + weight * y for x, y in zip(*parts, strict=True)]
    if len(total) > 1 and 0 < statistics.stdev(total) < 1e-9:
        return  # a spread that is rounding
    got = mp.group_advantages({"a": a, "b": b}, groups, "gdpo", weights={"a": 1.0, "b": weight})
    close(got, normal(total))


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_leave_one_out(samples):
    rewards, _, groups = split(samples)
    want = []
    for i, (r, group) in enumerate(zip(rewards.tolist(), groups.tolist(), strict=True)):
        others = [x for j, x in enumerate(rewards.tolist()) if groups[j] == group and j != i]
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        distance = r - statistics.fmean(others) if others else 0.0
        want.append(distance / (std + EPS) if std else distance)
    close(mp.group_advantages(rewards, groups, "loo_std"), want)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [8, 16, 33])
def test_pass_at_k_of_right_and_wrong_is_the_papers(n, k):
    """With c of n right, rho = 1 - C(n-c, k) / C(n, k): a right one gets (1 - rho) / sigma, and a wrong one
    (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma, sigma² = rho (1 - rho) (arXiv 2508.10751)."""
    for c in range(n + 1):
        rho = 1 - math.comb(n - c, k) / math.comb(n, k)
        sigma = math.sqrt(rho * (1 - rho))
        right = (1 - rho) / (sigma + EPS)
        wrong = 1 - rho
        if c < n:
            wrong -= math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
        want = [right] * c + [wrong / (sigma + EPS)] * (n - c)
        if rho in (0.0, 1.0) or n <= k:
            want = [0.0] * n
        rewards = torch.tensor([1.0] * c + [0.0] * (n - c))
        order = torch.from_numpy(np.random.default_rng(c).permutation(n))
        got = mp.group_advantages(rewards[order], torch.zeros(n).long(), "pass_at_k", k=k)
        close(got, torch.tensor(want)[order].tolist())


def test_gigpo_by_the_paper():
    """Two levels, read off arXiv 2505.10978: A = A^E(trajectory) + omega · A^S(turn), each within its own set."""
    rng = np.random.default_rng(0)
    for kind in ("grpo", "dr_grpo"):
        trajectories = []  # (task, [(state, reward), …])
        for _ in range(14):
            length = int(rng.integers(1, 7))
            steps = [(int(rng.integers(0, 4)), float(rng.normal())) for _ in range(length)]
            trajectories.append((int(rng.integers(0, 4)), steps))
        gamma, omega = 0.95, 0.7

        def norm(values, one, kind=kind):
            if len(values) < 2:
                return 0.0
            mean = sum(values) / len(values)
            if kind == "dr_grpo":
                return one - mean
            variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
            return (one - mean) / (math.sqrt(variance) + EPS)

        def ahead(steps, t, gamma=gamma):
            return sum(gamma ** (i - t) * r for i, (_, r) in enumerate(steps) if i >= t)

        want = []
        for task, steps in trajectories:
            rivals = [sum(r for _, r in other) for of, other in trajectories if of == task]
            macro = norm(rivals, sum(r for _, r in steps))
            for t, (state, _) in enumerate(steps):
                met = [
                    ahead(other, u)
                    for of, other in trajectories
                    for u, (there, _) in enumerate(other)
                    if of == task and there == state
                ]
                want.append(macro + omega * norm(met, ahead(steps, t)))
        got = mp.turn_advantages(
            torch.tensor([r for _, steps in trajectories for _, r in steps], dtype=torch.float64),
            torch.tensor([0, *(len(steps) for _, steps in trajectories)]).cumsum(0),
            torch.tensor([task for task, _ in trajectories]),
            "gigpo",
            kind,
            gamma=gamma,
            omega=omega,
            anchor=torch.tensor([state for _, steps in trajectories for state, _ in steps]),
        )
        close(got, want)
