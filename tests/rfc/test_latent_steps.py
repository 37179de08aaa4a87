"""Operators on denoising steps, of tests/rfc/README.md: densities and KL against scipy, samplers against what
they must keep, rewards and masks, and that a step stands where a token does in the losses that are there."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from support.latent_steps import (
    clipped_objective,
    ddim_step,
    flow_step,
    kept_steps,
    scatter_step_rewards,
    step_kl,
    step_logprobs,
)

import mmpack as mp

S, D = 7, 5


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def gaussians(rng):
    return rng.normal(size=(S, D)), rng.uniform(0.1, 2, S)


def test_logprobs_are_scipy_s(rng):
    means, stds = gaussians(rng)
    x = rng.normal(size=(S, D))
    wanted = stats.norm.logpdf(x, means, stds[:, None]).sum(axis=1)
    np.testing.assert_allclose(step_logprobs(x, means, stds), wanted, rtol=1e-12)
    joint = [
        stats.multivariate_normal.logpdf(x[s], means[s], stds[s] ** 2 * np.eye(D)) for s in range(S)
    ]
    np.testing.assert_allclose(step_logprobs(x, means, stds), joint, rtol=1e-12)


def test_kl_is_the_integral(rng):
    (means, stds), (ref_means, ref_stds) = gaussians(rng), gaussians(rng)
    got = step_kl(means, stds, ref_means, ref_stds)
    for s in range(S):
        total = 0.0
        for d in range(D):
            p, q = stats.norm(means[s, d], stds[s]), stats.norm(ref_means[s, d], ref_stds[s])
            low, high = p.ppf(1e-14), p.ppf(1 - 1e-14)
            total += integrate.quad(
                lambda x, p=p, q=q: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), low, high
            )[0]
        assert got[s] == pytest.approx(total, rel=1e-7)
    assert np.array_equal(step_kl(means, stds, means, stds), np.zeros(S))


def test_flow_kl_is_that_of_velocities(rng):
    """Flow-GRPO gives the KL in velocities (arXiv 2505.05470); ours is of the steps' Gaussians."""
    x, v, w = rng.normal(size=(3, S, D))
    t, dt, noise = rng.uniform(0.1, 0.9, S), -rng.uniform(0.01, 0.1, S), 0.7
    (mean, std), (ref, ref_std) = (flow_step(x, u, t, dt, noise) for u in (v, w))
    sigma = noise * np.sqrt(t / (1 - t))
    factor = -dt / 2 * (sigma * (1 - t) / (2 * t) + 1 / sigma) ** 2
    wanted = factor * ((v - w) ** 2).sum(axis=1)
    np.testing.assert_allclose(step_kl(mean, std, ref, ref_std), wanted, rtol=1e-12)


def variance_after(steps, noise, data_variance, until=0.05):
    """The variance that flow steps lead to, from t = 0.95, with the exact velocity of Gaussian data; no samples drawn.

    A linear step of x has the mean factor·x, which `flow_step` shows at x = 1.
    """
    times = np.linspace(0.95, until, steps + 1)
    exact = lambda t: (1 - t) ** 2 * data_variance + t**2  # noqa: E731
    variance = exact(times[0])
    for t, after in pairwise(times):
        one, at, dt = np.ones((1, 1)), np.array([t]), np.array([after - t])
        velocity = (t - (1 - t) * data_variance) / exact(t) * one
        factor, std = flow_step(one, velocity, at, dt, noise)
        variance = factor[0, 0] ** 2 * variance + std[0] ** 2
    return variance, exact(until)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.7, 1.0])
def test_flow_steps_keep_the_marginals_whatever_the_noise(noise):
    """The drift of the noise cancels its variance: the error falls with the step's size, to the same marginal."""
    errors = []
    for steps in (200, 400, 800):
        got, wanted = variance_after(steps, noise, data_variance=0.25)
        errors.append(abs(got / wanted - 1))
    assert errors[2] < 5e-3
    assert errors[2] < 0.6 * errors[1] < 0.6 * 0.6 * errors[0]


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_steps_keep_the_marginals(rng, eta):
    """From x = sqrt(a)·x0 + sqrt(1-a)·eps with the true eps, the next latent has mean sqrt(b)·x0 and variance 1 - b."""
    now, before = rng.uniform(0.1, 0.5, S), rng.uniform(0.6, 0.9, S)
    clean, eps = rng.normal(size=(2, S, D))
    x = np.sqrt(now)[:, None] * clean + np.sqrt(1 - now)[:, None] * eps
    mean, std = ddim_step(x, eps, now, before, eta)
    along = mean - np.sqrt(before)[:, None] * clean  # a multiple of eps
    share = along / eps
    np.testing.assert_allclose(share, np.broadcast_to(share[:, :1], share.shape), rtol=1e-9)
    np.testing.assert_allclose(share[:, 0] ** 2 + std**2, 1 - before, rtol=1e-9)
    assert (std == 0).all() == (eta == 0)


def test_ddpm_is_eta_one(rng):
    """The posterior of q(x_before | x_now, x0) of DDPM (arXiv 2006.11239 eq. 7)."""
    now, before = rng.uniform(0.1, 0.5, S), rng.uniform(0.6, 0.9, S)
    clean, eps = rng.normal(size=(2, S, D))
    x = np.sqrt(now)[:, None] * clean + np.sqrt(1 - now)[:, None] * eps
    mean, std = ddim_step(x, eps, now, before, 1.0)
    alpha = now / before
    of_clean = np.sqrt(before) * (1 - alpha) / (1 - now)
    of_x = np.sqrt(alpha) * (1 - before) / (1 - now)
    np.testing.assert_allclose(mean, of_clean[:, None] * clean + of_x[:, None] * x, rtol=1e-9)
    np.testing.assert_allclose(std**2, (1 - before) / (1 - now) * (1 - alpha), rtol=1e-9)


def test_rewards_over_steps_add_up():
    cu, rewards = np.array([0, 3, 3, 5]), np.array([3.0, 7.0, 1.0])
    assert scatter_step_rewards(rewards, cu, "last").tolist() == [0, 0, 3, 0, 1]
    assert scatter_step_rewards(rewards, cu, "all").tolist() == [3, 3, 3, 1, 1]
    assert scatter_step_rewards(rewards, cu, "mean").tolist() == [1, 1, 1, 0.5, 0.5]


# ---- a step stands where a token does ------------------------------------------------------------


def trajectories(rng):
    """Three of 4, 0 and 6 steps: latents drawn by the old policy, scored by a policy that has moved."""
    cu = np.array([0, 4, 4, 10])
    x, old_velocity, moved = rng.normal(size=(3, 10, D))
    t = np.concatenate([np.linspace(0.8, 0.2, 4), np.linspace(0.9, 0.1, 6)])
    dt = np.full(10, -0.05)
    old_mean, std = flow_step(x, old_velocity, t, dt, 0.7)
    latents = old_mean + std[:, None] * rng.normal(size=(10, D))
    mean, _ = flow_step(x, old_velocity + 0.5 * moved, t, dt, 0.7)
    return cu, step_logprobs(latents, mean, std), step_logprobs(latents, old_mean, std)


def test_policy_loss_takes_steps(rng):
    cu, logprobs, old = trajectories(rng)
    advantages = np.array([1.0, -2.0, 0.5])
    out = mp.policy_loss(
        torch.tensor(logprobs),
        torch.tensor(advantages),
        torch.tensor(cu, dtype=torch.int32),
        torch.tensor(old),
        aggregation="sequence_mean_token_mean",
    )
    wanted = clipped_objective(logprobs, old, np.repeat(advantages, np.diff(cu)), cu, 0.2)
    assert float(out.loss.detach()) == pytest.approx(wanted, rel=1e-6)
    assert float(out.metrics["clip_fraction"]) > 0


def test_masked_steps_reach_nothing(rng):
    """Deterministic steps (std 0) have no density: they are NaN here, and in no list."""
    cu, logprobs, old = trajectories(rng)
    mask = np.array([1, 1, 0, 0, 0, 1, 1, 1, 0, 0], bool)
    kept, cu_kept = kept_steps(mask, cu)
    assert kept.tolist() == [0, 1, 5, 6, 7] and cu_kept.tolist() == [0, 2, 2, 5]
    poisoned = np.where(mask, logprobs, np.nan)
    x = torch.tensor(poisoned, requires_grad=True)
    out = mp.policy_loss(
        x[torch.tensor(kept)],
        torch.tensor([1.0, -2.0, 0.5]),
        torch.tensor(cu_kept, dtype=torch.int32),
        torch.tensor(old[kept]),
    )
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert (x.grad[~torch.tensor(mask)] == 0).all() and torch.isfinite(x.grad).all()
    advantages = np.repeat([1.0, -2.0, 0.5], np.diff(cu_kept))
    ratio = np.exp(logprobs - old)[kept]
    terms = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert float(out.loss.detach()) == pytest.approx(terms.mean(), rel=1e-6)


def test_returns_over_steps_are_gae(rng):
    """A reward after the last step, discounted back over the steps, each trajectory by itself."""
    cu, rewards = np.array([0, 3, 3, 5]), np.array([3.0, 7.0, 1.0])
    steps = torch.tensor(scatter_step_rewards(rewards, cu, "last"))
    got, _ = mp.gae(steps, torch.zeros(5).double(), torch.tensor(cu).int(), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(got.numpy(), [0.75, 1.5, 3, 0.5, 1], rtol=1e-6)
