"""The kernels of csrc/ as ops of torch: loaded from where `python -m mmpack.kernels.build` left them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mmpack.kernels.build import library

# The numbers of csrc/ops.h.
KINDS = {"gspo": 1, "cispo": 2}
KL_KINDS = {"k1": 0, "k2": 1, "k3": 2}
CORRECTIONS = {None: 0, "tis": 1, "mis": 2}
LEVELS = {"token": 0, "sequence": 1, "geometric": 2}
ADVANTAGES = {"grpo": 0, "rloo": 1, "dr_grpo": 2, "lite_ppo": 3, "reinforce_pp": 4}
PLACES = {"last": 0, "all": 1, "mean": 2}

READ = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64}


def why_not() -> str | None:
    """Why the library can't be loaded; None where it can."""
    if library() is not None:
        return None
    return "csrc/ is not built for the GPUs here (python -m mmpack.kernels.build)"


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    advantages: Tensor,
    cu_loss: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    total: Tensor | None,
    scale: float,
    sample_mean: bool,
    kind: str,
    ratio_low: float,
    ratio_high: float,
    kl_kind: str,
    kl_coef: float,
    entropy_coef: float,
    correction: str | None,
    correction_level: str,
    correction_low: float,
    correction_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of mmpack::policy_loss."""
    results: tuple[Tensor, Tensor, Tensor] = _ops().policy_loss.default(
        _column(logprobs),
        _column(entropy),
        _column(advantages),
        _column(cu_loss),
        _column(old_logprobs),
        _column(ref_logprobs),
        _column(rollout_logprobs),
        _column(total),
        scale,
        sample_mean,
        KINDS.get(kind, 0),
        ratio_low,
        ratio_high,
        KL_KINDS[kl_kind],
        kl_coef,
        entropy_coef,
        CORRECTIONS[correction],
        LEVELS[correction_level],
        correction_low,
        correction_high,
    )
    return results


def group_advantages(rewards: Tensor, group_index: Tensor, kind: str, eps: float) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    advantages: Tensor = _ops().group_advantages.default(
        _numbers(rewards), _index(group_index), ADVANTAGES[kind], eps
    )
    return advantages


def scatter_rewards(rewards: Tensor, cu_loss: Tensor, count: int, weight: float, at: str) -> Tensor:
    """Arguments and results of mmpack::scatter_rewards."""
    scattered: Tensor = _ops().scatter_rewards.default(
        _numbers(rewards), _index(cu_loss), count, weight, PLACES[at]
    )
    return scattered


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [R, …], index [K] -> [K, …]."""
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    out: Tensor = _ops().gather_rows.default(flat, _index(index))
    return out.view(len(index), *x.shape[1:])


def sum_rows(values: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """values [K, …] (floating), order [K], offsets [R+1] -> [R, …]."""
    flat = values.reshape(len(values), math.prod(values.shape[1:])).contiguous()
    out: Tensor = _ops().sum_rows.default(flat, _index(order), _index(offsets))
    return out.view(len(offsets) - 1, *values.shape[1:])


@functools.cache
def _ops() -> Any:
    torch.ops.load_library(str(library()))
    return torch.ops.mmpack_native


def _column(tensor: Tensor | None) -> Tensor | None:
    """As the policy loss reads it: contiguous, of a type that it knows."""
    if tensor is None or (tensor.dtype in READ and tensor.is_contiguous()):
        return tensor
    return (tensor if tensor.dtype in READ else _numbers(tensor)).contiguous()


def _numbers(tensor: Tensor) -> Tensor:
    """Contiguous float32 or float64."""
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        return tensor
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float32 if narrow else torch.float64).contiguous()


def _index(tensor: Tensor) -> Tensor:
    """Contiguous int32 or int64."""
    if tensor.dtype in (torch.int32, torch.int64) and tensor.is_contiguous():
        return tensor
    return (tensor if tensor.dtype == torch.int32 else tensor.to(torch.int64)).contiguous()
