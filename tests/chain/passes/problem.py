"""The step that every run of the chain takes: samples, advantages, old and reference logprobs, and places of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from chain.record import Cells, Key
from torch import Tensor

from mmpack.layout.fingerprint import media_name
from mmpack.losses.kl import kl_divergence
from mmpack.losses.policy.loss import policy_loss
from mmpack.schema.sample import Sample

KL_COEF = 0.1
HEAD_ROWS = 8  # of a sample, whose logits are made


@dataclass
class Problem:
    """Samples with pictures (B of them, N loss tokens), on the model's device."""

    samples: list[Sample]
    advantages: Tensor  # [B] float32
    old: Tensor  # [N] float32, natural log
    ref: Tensor  # [N]
    companions: list[Sample]  # others, whose loss is not taken

    @property
    def tokens(self) -> list[int]:
        """First canonical row of each sample, and their number: [B + 1]."""
        return [0, *np.cumsum([len(s) for s in self.samples]).tolist()]

    @property
    def loss_tokens(self) -> list[int]:
        """The same of loss tokens."""
        return [0, *np.cumsum([s.num_loss_tokens for s in self.samples]).tolist()]

    @property
    def media(self) -> dict[str, tuple[int, int, int]]:
        """By name: first patch, first vision token (canonical rows), and patches."""
        out, patches, tokens = {}, 0, 0
        for sample in self.samples:
            for medium in sample.media:
                name = media_name(medium)
                if name not in out:
                    out[name] = (patches, tokens, medium.num_patches)
                    patches += medium.num_patches
                    tokens += medium.num_tokens
        return out

    def of(self, column: Tensor, samples: Sequence[int]) -> Tensor:
        """[n] of a column [N]: the loss tokens of these samples."""
        at = self.loss_tokens
        return torch.cat([column[at[s] : at[s + 1]] for s in samples])


def make_problem(
    samples: list[Sample], companions: list[Sample], logprobs: Tensor, seed: int = 0
) -> Problem:
    """A problem whose old and reference logprobs lie about the policy's `logprobs` [N]."""
    rng = np.random.default_rng(seed)
    noise = torch.from_numpy(rng.standard_normal((2, len(logprobs)))).to(logprobs.device)
    advantages = torch.from_numpy(rng.standard_normal(len(samples))).float()
    exact = logprobs.double()
    old, ref = (exact + 0.02 * noise[0]).float(), (exact + 0.1 * noise[1]).float()
    return Problem(samples, advantages.to(logprobs.device), old, ref, companions)


def take_loss(
    problem: Problem, logprobs: Tensor, samples: Sequence[int]
) -> tuple[Tensor, dict[Key, Cells]]:
    """The loss of these samples' logprobs [n], whose parts add up over batches, and cells of all that follows them."""
    counts = [problem.samples[s].num_loss_tokens for s in samples]
    cu_loss = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=logprobs.device)
    old, ref = (problem.of(x, samples) for x in (problem.old, problem.ref))
    chosen = torch.tensor(list(samples), device=logprobs.device)
    loss = policy_loss(
        logprobs,
        problem.advantages[chosen],
        cu_loss,
        old_logprobs=old,
        ref_logprobs=ref,
        kl_coef=KL_COEF,
        total_tokens=len(problem.old),
        total_samples=len(problem.samples),
    ).loss
    weights = problem.advantages[chosen].repeat_interleave(cu_loss.diff().long())
    at = loss_rows_of(problem, samples, logprobs.device)
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        ratio, kl = (leaf - old).exp(), kl_divergence(leaf, ref)
        (of_ratio,) = torch.autograd.grad((ratio * weights).sum(), leaf)
        (of_kl,) = torch.autograd.grad(kl.sum(), leaf)
    own = torch.arange(len(at), device=at.device)
    cells = {
        ("logprob", "logprobs"): Cells(logprobs.detach()[:, None], at),
        ("ratio", "ratio"): Cells(ratio.detach()[:, None], at, of_ratio[:, None], own),
        ("kl", "k3"): Cells(kl.detach().float()[:, None], at, of_kl[:, None], own),
        ("loss", "loss"): Cells(loss.detach().reshape(1, 1), at[:1] * 0),
    }
    if logprobs.requires_grad:
        (slope,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        for key in (("logprob", "logprobs"), ("loss", "loss")):
            cells[key].gradient, cells[key].group = slope[:, None], own
        cells["loss", "loss"].apart = at
    return loss, cells


def loss_rows_of(problem: Problem, samples: Sequence[int], device: Any) -> Tensor:
    """int64 [n]: canonical loss tokens of these samples."""
    at = problem.loss_tokens
    return torch.cat([torch.arange(at[s], at[s + 1]) for s in samples]).to(device)
