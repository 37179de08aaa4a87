"""A constrained problem whose optimum is known, solved by the real path: pack, scatter, advantages, policy_loss.

A bandit of K arms with entropy: maximise π·r + τ H(π) where π·c ≤ d. The optimum is π* ∝ exp((r - λ* c) / τ), with λ*
the root of π(λ)·c = d, or 0 where the limit is kept without it.
"""

import numpy as np
import pytest
import torch
from scipy import optimize

import mmpack as mp
from mmpack.losses.constrained import PID, LagrangeMultiplier, Rewards, constrained_advantages

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
    sample.rewards, sample.costs = [mp.Score("paid", R[arm])], [mp.schema.Cost("harm", C[arm])]
    return sample


class Critics:
    """Advantages [N] of tokens by GAE, from a critic of rewards and one of costs that learn: PPO-Lagrangian."""

    def __init__(self):
        self.values = {name: torch.zeros(1, requires_grad=True) for name in ("paid", "harm")}
        self.optimizer = torch.optim.SGD(self.values.values(), lr=0.5)

    def __call__(self, batch, paid, charged, multiplier):
        losses = []

        def gae_of(name, rewards):
            values = self.values[name].expand(len(rewards))
            advantages, returns = mp.gae(rewards, values.detach(), batch.cu_loss)
            losses.append(mp.value_loss(values, returns, batch.cu_loss))
            return advantages

        out = constrained_advantages(
            paid.advantages_by(gae_of), charged.advantages_by(gae_of), multiplier
        )
        self.optimizer.zero_grad()
        sum(losses).backward()
        self.optimizer.step()
        return out


def solve(multiplier, steps, advantages_of):
    """Gradient descent on K logits. Returns policies and multipliers of the last third, averaged."""
    generator = np.random.default_rng(0)
    logits = torch.zeros(len(R), requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=8.0)
    policies, values = [], []
    for _ in range(steps):
        policy = torch.softmax(logits.detach().double(), 0).numpy()
        batch = mp.pack([answer(i, arm) for i, arm in enumerate(drawn(policy, generator))])
        charged = mp.losses.scatter_costs(batch)
        paid = Rewards({"paid": mp.scatter_rewards(batch)}, per="token")
        weight = 1 + sum(multiplier.values.values())
        advantages = advantages_of(batch, paid, charged, multiplier)
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
        multiplier.update(charged.per_sample(batch.cu_loss))
        policies.append(policy)
        values.append(multiplier.values["harm"])
    tail = steps // 3
    return np.mean(policies[-tail:], axis=0), float(np.mean(values[-tail:])), np.std(values[-tail:])


@pytest.mark.slow
def test_ppo_with_two_critics_converges_to_the_same():
    limit, critics = 0.25, Critics()
    best, policy = optimum(limit)
    multiplier = LagrangeMultiplier({"harm": limit}, PID(0.4, 0.2, 0.2))
    found, value, _ = solve(multiplier, 180, critics)
    assert value == pytest.approx(best, rel=0.05)
    np.testing.assert_allclose(found, policy, atol=0.02)
    assert critics.values["harm"].item() == pytest.approx(limit, abs=0.03)
    assert critics.values["paid"].item() == pytest.approx(policy @ R, abs=0.05)
