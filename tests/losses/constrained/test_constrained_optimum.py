"""A constrained problem whose optimum is known, solved by the real path: pack, scatter, advantages, policy_loss.

A bandit of K arms with entropy: maximise π·r + τ H(π) where π·c ≤ d. The optimum is π* ∝ exp((r - λ* c) / τ), with λ*
the root of π(λ)·c = d, or 0 where the limit is kept without it.
"""

import numpy as np
import pytest
import torch
from scipy import optimize

import mmpack as mp
from mmpack.losses.constrained import (
    PID,
    DualAscent,
    LagrangeMultiplier,
    Rewards,
    constrained_advantages,
)

R = np.array([1.0, 0.7, 0.4, 0.0])
C = np.array([1.0, 0.5, 0.2, 0.0])
TAU, DRAWN = 0.25, 32


def policy_at(multiplier):
    z = (R - multiplier * C) / TAU
    return np.exp(z - z.max()) / np.exp(z - z.max()).sum()


def optimum(limit):
    """λ* by scipy's root finder, π* by its solver of constrained problems, which knows nothing of λ."""
    gap = lambda x: policy_at(x) @ C - limit  # noqa: E731
    best = optimize.brentq(gap, 0.0, 100.0) if gap(0.0) > 0 else 0.0
    found = optimize.minimize(
        lambda p: -(p @ R) + TAU * (p @ np.log(p)),
        np.full(4, 0.25),
        bounds=[(1e-9, 1.0)] * 4,
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1},
            {"type": "ineq", "fun": lambda p: limit - p @ C},
        ],
        options={"ftol": 1e-12, "maxiter": 500},
    )
    np.testing.assert_allclose(found.x, policy_at(best), atol=1e-4)
    return best, found.x


def drawn(policy, generator):
    """Arms [n], each π·n times on average, drawn systematically: less noise than independent draws, and no bias."""
    places = (np.arange(DRAWN) + generator.random()) / DRAWN
    return np.minimum(np.searchsorted(np.cumsum(policy), places), len(policy) - 1)


def answer(i, arm):
    """A prompt of one token; the arm is the response."""
    ids = np.array([0, arm])
    sample = mp.Sample(str(i), "bandit", "qwen2_vl", ids, [], [], [mp.LossSpan(1, 2)])
    sample.rewards, sample.costs = [mp.Score("paid", R[arm])], [mp.Cost("harm", C[arm])]
    return sample


def solve(multiplier, steps, kind="dr_grpo"):
    """Gradient descent on K logits. Returns policies and multipliers of the last third, averaged."""
    generator = np.random.default_rng(0)
    logits = torch.zeros(len(R), requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=8.0)
    policies, values = [], []
    for _ in range(steps):
        policy = torch.softmax(logits.detach().double(), 0).numpy()
        batch = mp.pack([answer(i, arm) for i, arm in enumerate(drawn(policy, generator))])
        charged = mp.scatter_costs(batch).per_sample(batch.cu_loss)
        paid = Rewards({"paid": mp.scatter_rewards(batch)}, per="token").per_sample(batch.cu_loss)
        weight = 1 + sum(multiplier.values.values())
        advantages = constrained_advantages(
            paid.advantages(batch.group_index, kind),
            charged.advantages(batch.group_index, kind),
            multiplier,
        )
        logprobs, entropy = mp.selected_logprobs(
            logits.expand(len(batch.input_ids), -1),
            batch.loss_targets,
            rows=batch.loss_rows,
            entropy=True,
        )
        out = mp.policy_loss(
            logprobs, advantages, batch.cu_loss, entropy=entropy, entropy_coef=TAU / weight
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        multiplier.update(charged)
        policies.append(policy)
        values.append(multiplier.values["harm"])
    tail = steps // 3
    return np.mean(policies[-tail:], axis=0), float(np.mean(values[-tail:])), np.std(values[-tail:])


@pytest.mark.parametrize(("rule", "start"), [(DualAscent(0.2), 0.0), (PID(0.4, 0.2, 0.2), 4.0)])
def test_the_multiplier_converges_to_the_known_one(rule, start):
    limit = 0.25
    best, policy = optimum(limit)
    assert best > 0.3  # the limit binds
    found, value, spread = solve(
        LagrangeMultiplier({"harm": limit}, rule, initial=start), steps=250
    )
    assert value == pytest.approx(best, rel=0.03) and spread < 0.1 * best
    np.testing.assert_allclose(found, policy, atol=0.02)
    assert found @ C == pytest.approx(limit, abs=0.01)
    assert policy_at(0.0) @ C > limit + 0.2  # without the constraint it is broken by far


def test_a_limit_that_is_kept_anyway_costs_nothing():
    limit = 0.9
    best, policy = optimum(limit)
    assert best == 0.0
    found, value, _ = solve(LagrangeMultiplier({"harm": limit}, DualAscent(0.1), initial=1.0), 150)
    assert value == 0.0
    np.testing.assert_allclose(found, policy, atol=0.02)
