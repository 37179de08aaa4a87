"""Estimates of KL(policy ‖ reference) from the logprobs [N] of sampled tokens, in nats, one per token."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name
from mmpack.ops.inputs import check_are_tensors

LOG_RATIO_BOUND = 20.0  # exp is taken within ±20, as verl does; e^20 still sums in float32
KLKind = Literal["k1", "k2", "k3"]


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token KL(policy ‖ reference) with Schulman's values and the gradient of the KL itself.

    With d = logprobs - ref_logprobs the values are k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d (Schulman 2020,
    joschu.net/blog/kl-approx.html); k1 and k3 are unbiased, k3 is never negative. Only the exponent is clamped, to
    ±20: verl also clamps k3 itself to 10, which it exceeds for d below -2.6 or above 11, and drops
    the gradient there.

    The gradient is d · ∇logp for every kind: E[d · ∇logp] = ∇KL(policy ‖ reference) under the policy. Plain
    differentiation gives that only for k2. For k1 it gives ∇logp, 0 on average; for k3 (1 - exp(-d)) · ∇logp, which
    is ∇KL(reference ‖ policy) (arXiv 2510.01555; arXiv 2512.21852). So value and gradient are computed separately.

    "Under the policy" means tokens sampled from it, each KL given its prefix. For tokens of an older policy weight
    the result with the detached ratio.

    Args: logprobs, ref_logprobs: [N] float, natural log; the reference gets no gradient. Returns [N] float64.
    Raises ArgumentError for an unknown kind, and columns of unlike shapes or devices.
    """
    check_kl_kind(kind)
    check_are_tensors("kl_divergence", logprobs=logprobs, ref_logprobs=ref_logprobs)
    if logprobs.shape != ref_logprobs.shape or logprobs.device != ref_logprobs.device:
        raise ArgumentError(
            f"kl_divergence: logprobs has shape {list(logprobs.shape)} on {logprobs.device}, ref_logprobs "
            f"{list(ref_logprobs.shape)} on {ref_logprobs.device}. "
            f"Fix: pass logprobs of the same tokens"
        )
    d = logprobs.double() - ref_logprobs.detach().double()
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    value = d.detach()
    if kind == "k3":
        value = k3(value)
    return value + (k2 - k2.detach())


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-d) - 1 + d for d [N] = log p(x) - log q(x): estimates KL(p ‖ q) from x of p."""
    return torch.expm1(-log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) + log_ratio


def check_kl_kind(kind: str) -> None:
    """Raise ArgumentError for a name that is none."""
    check_name("kl_divergence", "kind", kind, get_args(KLKind))
