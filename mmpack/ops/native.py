"""The kernels of csrc/ as ops of torch: loaded from where `python -m mmpack.ops.build` left them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmpack.families import Family
from mmpack.ops.build import library
from mmpack.ops.patches.division import divides_bytes
from mmpack.video.patches import CHANNELS, merge_of

# The numbers of csrc/ops.h.
KINDS = {"gspo": 1, "cispo": 2}
KL_KINDS = {"k1": 0, "k2": 1, "k3": 2}
CORRECTIONS = {None: 0, "tis": 1, "mis": 2}
LEVELS = {"token": 0, "sequence": 1, "geometric": 2}
ADVANTAGES = {"grpo": 0, "rloo": 1, "dr_grpo": 2, "lite_ppo": 3, "reinforce_pp": 4}
CHANGES = {"convert": 0, "normalise": 1, "normalise_bytes": 2, "rescale": 3}
PLACES = {"last": 0, "all": 1, "mean": 2}

READ = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64}


def why_not() -> str | None:
    """Why the library can't be loaded; None where it can."""
    if library() is not None:
        return None
    return "csrc/ is not built for the GPUs here (python -m mmpack.ops.build)"


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
    dual_clip: float,
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
        dual_clip,
        KL_KINDS[kl_kind],
        kl_coef,
        entropy_coef,
        CORRECTIONS[correction],
        LEVELS[correction_level],
        correction_low,
        correction_high,
    )
    return results


def group_advantages(
    rewards: Tensor, group_index: Tensor, tokens: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Arguments and results of mmpack::group_advantages."""
    weights = None if tokens is None else tokens.double().contiguous()
    advantages: Tensor = _ops().group_advantages.default(
        _numbers(rewards), _index(group_index), weights, ADVANTAGES[kind], eps
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


def pack_video(
    frames: Tensor,
    out: Tensor,
    shifts: Tensor | None,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    scale: float | None,
    repeat: bool,
    aligned: int,
) -> None:
    """Fill `out` [rows, patch_dim] from `frames`, one buffer or the first clip. Tables: `PatchTables`.

    `shifts` [C] int64: values that each clip is further from the first than in one buffer; None for a buffer.
    `aligned`: bytes of which the addresses of all clips are multiples. Bytes have no gradient: `repeat` is True.
    """
    if out.numel() == 0:
        return
    change = "normalise" if mean is not None else "convert" if scale is None else "rescale"
    mean, std = tuple(mean or (0.0,) * 3), tuple(std or (1.0,) * 3)
    if change == "normalise" and divides_bytes(mean, std):
        change = "normalise_bytes"
    _ops().pack_video.default(
        frames,
        out,
        shifts,
        patches,
        blocks,
        *_geometry(family, channels_last),
        CHANGES[change],
        *mean,
        *std,
        1.0 if scale is None else scale,
        _words(family, channels_last, aligned),
    )


def unpack_video(
    rows: Tensor,
    out: Tensor,
    patches: Tensor,
    blocks: Tensor,
    family: Family,
    channels_last: bool,
    total: bool,
) -> None:
    """Fill the buffer `out` [values] from `rows`. Bytes have no gradient: `total` is False."""
    if rows.numel() == 0:
        return
    geometry = _geometry(family, channels_last)
    token = family.patch_dim * merge_of(family) ** 2
    words = math.gcd(16, rows.data_ptr(), token), _words(family, channels_last, out.data_ptr())
    _ops().unpack_video.default(rows, out, patches, blocks, *geometry, *words)


def _geometry(family: Family, channels_last: bool) -> tuple[int, int, int, bool]:
    return family.patch_size, merge_of(family), family.temporal_patch_size, channels_last


def _words(family: Family, channels_last: bool, aligned: int) -> int:
    """Bytes of the words in which a token's lines are read or written."""
    line = family.patch_size * merge_of(family) * (CHANNELS if channels_last else 1)
    return math.gcd(4, aligned, line)


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
