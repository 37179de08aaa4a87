"""Advantages [B] from rewards [B], one per sample, compared within groups (the samples of one prompt)."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number
from mmpack.losses.advantages import GROUP_ADVANTAGES
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op
from mmpack.ops.inputs import can_look_at, check_are_tensors

AdvantageKind = Literal["grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp"]


def group_advantages(
    rewards: Tensor,
    group_index: Tensor,
    kind: AdvantageKind = "grpo",
    eps: float = 1e-6,
    *,
    num_tokens: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Advantages [B] float32 over the whole batch, before it is planned into micro-batches and ranks.

    With r a reward, mean and std of its group, n the group's size (std with n - 1):

    - `grpo`: (r - mean) / (std + eps) (arXiv 2402.03300 section 4.1.2)
    - `dr_grpo`: r - mean (arXiv 2503.20783)
    - `rloo`: r - the mean of the others, = (r - mean) · n / (n - 1) (arXiv 2402.14740)
    - `lite_ppo`: (r - mean) / (std of the batch's rewards + eps) (arXiv 2508.08221)
    - `reinforce_pp`: a = r - mean, then (a - batch mean of a) / (batch std of a + eps) (REINFORCE++ with baseline,
      arXiv 2501.03262 section 3.3). In a group of one a = r, as in its form for one sample per prompt. The batch's mean
      and std are over samples, as in the paper; with `num_tokens` over loss tokens, as in verl, so that long samples
      count for more.

    A std of 0, or of a single value, gives the advantage 0. A group of one gives 0 for every kind but
    `reinforce_pp`: it has nothing to be compared with (TRL does so too; verl's rloo passes the bare reward on).

    Args: rewards: [B] float. group_index: [B] int, any numbers in any order. eps: TRL takes 1e-4, verl 1e-6.
    num_tokens: [B] int, the loss tokens of each sample (`Sample.num_loss_tokens`), for `reinforce_pp` only.
    check: read the values, which waits for a GPU once per batch. A NaN or infinite reward is an error. If all groups
    have one sample (no `group_id`) and every advantage is 0 for that, it is a UserWarning. False reads nothing and
    does not wait, as a CUDA graph needs it; while torch.compile traces, nothing is read either.
    Sums are float64 and in the order of the batch, so all of a group get the same mean and std. Of float64 rewards the
    first 32 bits count, so that equal ones have a std of 0. One launch on a GPU.
    Raises ArgumentError for shapes, dtypes and devices that don't fit, an eps below 0, an unknown kind, and rewards as
    said.

    Example: two groups of two samples.
        >>> import torch
        >>> import mmpack as mp
        >>> rewards, groups = torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
        >>> mp.group_advantages(rewards, groups)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    check_name("group_advantages", "kind", kind, get_args(AdvantageKind))
    check_are_tensors(
        "group_advantages",
        ("num_tokens",),
        rewards=rewards,
        group_index=group_index,
        num_tokens=num_tokens,
    )
    check_number("group_advantages", "eps", eps, least=0)
    fits = rewards.ndim == 1 and rewards.shape == group_index.shape
    if not (fits and rewards.is_floating_point() and _are_integers(group_index)):
        raise ArgumentError(
            f"group_advantages: rewards has shape {list(rewards.shape)} and dtype {rewards.dtype}, group_index "
            f"{list(group_index.shape)} and {group_index.dtype}, expected [B] floats and [B] integers. "
            "Fix: pass one reward per sample, and the number of its group"
        )
    if rewards.device != group_index.device:
        raise ArgumentError(
            f"group_advantages: rewards are on {rewards.device}, group_index on {group_index.device}. "
            "Fix: move both to one device"
        )
    if check and not torch.compiler.is_compiling():
        _check_values(rewards, group_index, kind)
    if num_tokens is not None:
        _check_num_tokens(num_tokens, rewards, kind)
    advantages: Tensor = _op(_summable(rewards.detach()), group_index, num_tokens, kind, eps)
    return advantages


def _summable(rewards: Tensor) -> Tensor:
    """float64 rounded to 32 bits (Veltkamp's split): sums of equal rewards are exact, so that their std is 0."""
    if rewards.dtype != torch.float64:
        return rewards
    shifted = rewards * (2**21 + 1)
    return shifted - (shifted - rewards)


def _check_num_tokens(num_tokens: Tensor, rewards: Tensor, kind: str) -> None:
    if kind != "reinforce_pp":
        raise ArgumentError(
            f"group_advantages: num_tokens is given and kind is {kind!r}, which looks at no token. "
            "Fix: leave it out, or kind='reinforce_pp'"
        )
    fits = num_tokens.shape == rewards.shape and num_tokens.device == rewards.device
    if not (fits and _are_integers(num_tokens)):
        raise ArgumentError(
            f"group_advantages: num_tokens has shape {list(num_tokens.shape)} and dtype {num_tokens.dtype} on "
            f"{num_tokens.device}, expected {list(rewards.shape)} integers on {rewards.device}. "
            "Fix: pass the loss tokens of each sample"
        )
    if can_look_at(num_tokens) and bool((num_tokens < 0).any()):
        raise ArgumentError(
            f"group_advantages: num_tokens holds {int(num_tokens.min())}. Fix: pass 0 or more of each sample"
        )


def _are_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_values(rewards: Tensor, group_index: Tensor, kind: str) -> None:
    """Raise for rewards that are not finite; warn where each sample is the only one of its group, and gets 0 for it."""
    if rewards.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "group_advantages: a CUDA graph is being captured, and the rewards can't be read. Fix: check=False"
        )
    values = rewards.detach().cpu()
    bad = (~values.float().isfinite()).nonzero()[:, 0].tolist()
    if bad:
        named = ", ".join(f"rewards[{i}] is {float(values[i])}" for i in bad[:3])
        raise ArgumentError(
            f"group_advantages: {named} ({len(bad)} of {len(values)} are not finite in float32), which makes NaN "
            "or 0 of the group's advantages. Fix: leave those samples out, or score them again"
        )
    no_pairs = len(values) > 0 and len(group_index.unique()) == len(values)
    if no_pairs and kind != "reinforce_pp":
        warnings.warn(
            f"group_advantages: each of {len(values)} samples is alone in its group, so every advantage is 0 and "
            "nothing is learned. Fix: give samples of one prompt one group_id, or use kind='reinforce_pp'",
            UserWarning,
            stacklevel=3,
        )


def _run(rewards: Tensor, *rest: Any) -> Tensor:
    module = implementation(GROUP_ADVANTAGES, rewards.device)
    advantages: Tensor = module.group_advantages(rewards, *rest)
    return advantages


def _fake(rewards: Tensor, *_: Any) -> Tensor:
    return rewards.new_empty(len(rewards), dtype=torch.float32)


_op = define_op(
    "group_advantages(Tensor rewards, Tensor group_index, Tensor? num_tokens, str kind, float eps) -> Tensor",
    _run,
    _fake,
)
