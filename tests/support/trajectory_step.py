"""One policy step on the samples of trajectories, on the device of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.models import Gradients

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.schema.sample import Sample
from mmpack.trajectory import trajectory_index


def step(
    model: Any,
    samples: Sequence[Sample],
    share_prefix: bool,
    per_trajectory: Sequence[float] = (0.7, -1.3),
) -> tuple[Any, torch.Tensor, torch.Tensor, Gradients]:
    """The batch, logprobs [N], the loss and its gradients: one advantage per trajectory."""
    batch = mp.pack(samples, share_prefix=share_prefix).to(model.device)
    index = torch.from_numpy(trajectory_index(samples))
    advantages = torch.tensor(per_trajectory)[index].to(model.device)
    model.zero_grad(set_to_none=True)
    with attach(model):
        logprobs = packed_logprobs(model, batch)
        out = mp.policy_loss(
            logprobs,
            advantages,
            batch.cu_loss,
            rollout_logprobs=batch.loss_columns["rollout_logprobs"],
            correction="tis",
            total_tokens=batch.num_loss_tokens,
            total_samples=len(samples),
        )
        out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return batch, logprobs.detach(), out.loss.detach(), gradients
