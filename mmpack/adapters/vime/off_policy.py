"""Samples of a micro-batch of vime's and slime's, and weights [N]: of their reduction, and of importance."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpack.adapters.vime.megatron import ranks
from mmpack.adapters.vime.places import Layout, places
from mmpack.errors import ArgumentError
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import LOG_RATIO_BOUND
from mmpack.losses.samples import per_token
from mmpack.ops.segments import segment_sum

Reduce = Callable[[Tensor], Tensor]


def token_weights(reduce: Reduce, like: Tensor) -> Tensor:
    """The weight [N] of each term in a reduction that is linear in the terms: its gradient."""
    # a backward of its own, which the hooks of a checkpoint around the loss must not see
    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), plain:
        terms = torch.zeros_like(like, dtype=torch.float32, requires_grad=True)
        reduced = reduce(terms)
        if not isinstance(reduced, Tensor) or not reduced.requires_grad:
            return terms.detach()  # of no sample
        (weight,) = torch.autograd.grad(reduced, terms)
    return weight


class Samples(NamedTuple):
    """The samples of a micro-batch, as far as this context-parallel rank has them."""

    masks: Tensor  # [N] float32, loss masks of this rank's response tokens
    offsets: Tensor  # [B + 1] int64 into N
    responses: list[np.ndarray]  # per sample int64, index into its response of this rank's tokens
    counts: Tensor  # [B] float64, loss tokens of the whole sample, at least 1
    cp_group: Any  # None for one rank


class OffPolicy(NamedTuple):
    importance: Tensor | float  # [N], what the surrogate is multiplied by
    weight: Tensor  # [N], of what is left after rejection
    masks: Sequence[Tensor]
    metrics: dict[str, Tensor] | None  # [N] each


def samples_of(batch: Mapping[str, Any], device: torch.device) -> Samples:
    here = ranks()
    masks = list(batch["loss_masks"])
    counts = torch.stack([m.sum() for m in masks]).double().clamp(min=1) if masks else None
    layout: Layout = "zigzag" if here.cp_size > 1 else "single"
    own = places(
        batch["total_lengths"], batch["response_lengths"], layout, here.cp_rank, here.cp_size, None
    ).responses
    if here.cp_size > 1:
        index = (torch.from_numpy(x).to(device, non_blocking=True) for x in own)
        masks = [m[at] for m, at in zip(masks, index, strict=True)]
    offsets = torch.tensor([0, *(len(x) for x in own)]).cumsum(0).to(device, non_blocking=True)
    none = torch.zeros(0, device=device)
    return Samples(
        torch.cat([none, *masks]),
        offsets,
        own,
        none.double() if counts is None else counts,
        here.cp_group,
    )


def per_sample(values: Tensor, samples: Samples) -> Tensor:
    """[N] float64: the mean over the sample's loss tokens, of all context-parallel ranks, at each of its tokens."""
    sums = segment_sum(values.double() * samples.masks, samples.offsets)
    if samples.cp_group is not None:
        torch.distributed.all_reduce(sums, group=samples.cp_group)
    return per_token(sums / samples.counts, samples.offsets, len(values))


def spread(values: Tensor, samples: Samples) -> Tensor:
    """The sum over each sample [N], in equal shares at its loss tokens."""
    everywhere = samples._replace(masks=torch.ones_like(samples.masks))
    return per_sample(values, everywhere) * samples.masks


def off_policy_of(
    args: Any,
    batch: Mapping[str, Any],
    trained: Tensor,
    rollout: Tensor | None,
    weight: Tensor,
    reduce: Reduce,
) -> OffPolicy:
    """Importance weights between the engine that sampled and the trainer, by their options."""
    masks = batch["loss_masks"]
    if not (args.get_mismatch_metrics or args.use_tis):
        return OffPolicy(1.0, weight, masks, None)
    rollout = needed(rollout, "use_tis", "rollout_log_probs")
    read = weight != 0
    if getattr(args, "custom_tis_function_path", None) is None:
        trained, rollout = torch.where(read, trained, 0.0), torch.where(read, rollout, 0.0)
        cu_loss = torch.tensor([0, len(trained)], device=trained.device, dtype=torch.int32)
        importance, cut = correction_weights(
            trained, rollout, cu_loss, "tis", low=args.tis_clip_low, high=args.tis_clip
        )
        ratio = (trained - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        metrics = {"tis": ratio, "tis_clipfrac": cut.float(), "tis_abs": (ratio - 1).abs()}
        return OffPolicy(importance.float(), weight, masks, metrics)
    with torch.no_grad():
        importance, modified, metrics = function_at(args.custom_tis_function_path)(
            args=args,
            pg_loss=torch.ones_like(trained),
            train_log_probs=list(trained.split([len(x) for x in batch["rollout_log_probs"]])),
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=masks,
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
    if modified is not masks:
        weight = token_weights(_reducer(args, batch, modified, reduce), trained)
    return OffPolicy(torch.where(weight != 0, importance, 0.0), weight, modified, metrics)


def _reducer(
    args: Any, batch: Mapping[str, Any], masks: Sequence[Tensor], reduce: Reduce
) -> Reduce:
    """Theirs again, of masks that a rejection changed. By the function that made the first one."""
    make = importlib.import_module(reduce.__module__).get_sum_of_sample_mean
    lengths = batch["total_lengths"], batch["response_lengths"]
    made: Reduce
    if "rollout_mask_sums" in batch:
        made = make(*lengths, masks, batch["rollout_mask_sums"], args.calculate_per_token_loss)
    else:  # before there were rollouts of several samples
        made = make(*lengths, masks, args.calculate_per_token_loss, args.qkv_format, None)
    return made


def needed(column: Tensor | None, option: str, name: str) -> Tensor:
    if column is None:
        raise ArgumentError(
            f"vime: {option} is on, and the batch has no {name}. Fix: let the rollout record it, or turn the option off"
        )
    return column


def function_at(path: str) -> Callable[..., Any]:
    """As their `load_function`: a module's attribute."""
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
