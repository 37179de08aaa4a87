"""The operators of tests/rfc/README.md in float64 numpy: what any faster version would be tested against.

S steps of all trajectories, concatenated; a step's latent is flattened to D numbers; `cu_steps` [B+1] cuts S into
trajectories. A step is a Gaussian: its policy is the mean, its std [S] follows from the sampler's schedule.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

Array = Any


def step_logprobs(latents: Array, means: Array, stds: Array) -> Array:
    """[S] natural log of the density of `latents` [S, D] under N(means [S, D], stds [S]²), summed over D."""
    z = (latents - means) / stds[:, None]
    dims = latents.shape[1]
    return -0.5 * (z * z).sum(axis=1) - dims * (np.log(stds) + 0.5 * np.log(2 * np.pi))


def step_kl(means: Array, stds: Array, ref_means: Array, ref_stds: Array) -> Array:
    """[S] KL(N(means, stds²) ‖ N(ref_means, ref_stds²)) in closed form, summed over D."""
    dims = means.shape[1]
    moved = ((means - ref_means) ** 2).sum(axis=1)
    ratio = stds / ref_stds
    return 0.5 * (dims * (ratio * ratio - 1) + moved / ref_stds**2) - dims * np.log(ratio)


def flow_step(x: Array, velocity: Array, t: Array, dt: Array, noise: float) -> tuple[Array, Array]:
    """Mean [S, D] and std [S] of a stochastic step of a rectified flow (Flow-GRPO, arXiv 2505.05470).

    `t` in (0, 1) falls to 0, the data; dt < 0; sigma = noise · sqrt(t / (1 - t)).
    """
    sigma = noise * np.sqrt(t / (1 - t))
    drift = velocity + (sigma**2 / (2 * t))[:, None] * (x + (1 - t)[:, None] * velocity)
    return x + drift * dt[:, None], sigma * np.sqrt(-dt)


def ddim_step(x: Array, eps: Array, now: Array, before: Array, eta: float) -> tuple[Array, Array]:
    """Mean [S, D] and std [S] of a stochastic DDIM step (arXiv 2010.02502 eq. 12 and 16; DDPO takes eta = 1).

    `now`, `before`: cumulative alphas [S] of this step and of the less noisy one that follows.
    """
    std = eta * np.sqrt((1 - before) / (1 - now)) * np.sqrt(1 - now / before)
    clean = (x - np.sqrt(1 - now)[:, None] * eps) / np.sqrt(now)[:, None]
    towards = np.sqrt(1 - before - std**2)[:, None] * eps
    return np.sqrt(before)[:, None] * clean + towards, std


def kept_steps(mask: Array, cu_steps: Array) -> tuple[Array, Array]:
    """Indices [K] of the steps that a mask bool [S] keeps, and their cu [B+1]: what is masked is in no list."""
    kept = np.flatnonzero(mask)
    return kept, np.searchsorted(kept, cu_steps)


def scatter_step_rewards(rewards: Array, cu_steps: Array, at: str) -> Array:
    """[B] to [S]: a trajectory's reward at its `last` step, in full at `all`, or evenly spread (`mean`)."""
    lengths = np.diff(cu_steps)
    spread = np.repeat(rewards, lengths)
    if at == "mean":
        spread = spread / np.repeat(np.maximum(lengths, 1), lengths)
    if at == "last":
        is_last = np.isin(np.arange(cu_steps[-1]), cu_steps[1:][lengths > 0] - 1)
        spread = np.where(is_last, spread, 0.0)
    return spread


def clipped_objective(
    logprobs: Array, old: Array, advantages: Array, cu_steps: Array, clip: float
) -> float:
    """Mean over trajectories of the mean over their steps of -min(r·A, clip(r)·A): Flow-GRPO's and DDPO's loss."""
    ratio = np.exp(logprobs - old)
    terms = -np.minimum(ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages)
    means = [terms[a:b].mean() for a, b in pairwise(cu_steps) if a < b]
    return float(np.sum(means) / (len(cu_steps) - 1))
