"""The policy loss of vime's and slime's actor: their options and reduction, mmpack's logprobs, ratio, KL and loss.

Their reduction is a function that they hand over, linear in the terms [N] of response tokens. So it is a weight [N] per
token: the terms are never made, `mp.policy_loss` takes advantages that carry the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpack.adapters.vime.megatron import backends, ranks
from mmpack.adapters.vime.responses import Layout, log_probs_and_entropy, places, whole_numbers
from mmpack.errors import ArgumentError, check_name
from mmpack.losses.correction import correction_weights
from mmpack.losses.kl import LOG_RATIO_BOUND, k3
from mmpack.losses.policy.loss import policy_loss
from mmpack.losses.samples import per_token
from mmpack.ops.segments import segment_sum

# ---- samples, and weights of tokens -----------------------------------------------------------------

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


KL_KINDS = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_BOUND = 10.0  # their clamp of low_var_kl


def loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """Stands in for their `policy_loss_function`: the same arguments, the same loss, the same metrics.

    Args:
        args: their options: `advantage_estimator` (grpo, gspo, cispo, ppo, reinforce_plus_plus, …), `eps_clip`,
            `eps_clip_high`, `eps_clip_c`, `entropy_coef`, `use_kl_loss`, `kl_loss_coef`, `kl_loss_type`,
            `use_unbiased_kl`, `use_rollout_logprobs`, `use_tis`, `get_mismatch_metrics`, `tis_clip`, `tis_clip_low`,
            `custom_tis_function_path` (its weights must multiply the loss, and not be negative), `use_opsm`,
            `opsm_delta`, `custom_pg_loss_reducer_function_path`, `calculate_per_token_loss`, and what
            `log_probs_and_entropy` reads.
        batch: theirs: `unconcat_tokens`, `total_lengths`, `response_lengths`, `loss_masks`, `advantages`, and where an
            option needs them `log_probs`, `ref_log_probs`, `rollout_log_probs`, `rollout_top_p_token_ids`,
            `rollout_top_p_token_offsets`, `opd_reverse_kl`.
        logits: [1, T, V / tensor-parallel ranks].
        sum_of_sample_mean: theirs, of this micro-batch.

    Returns the loss, and detached scalars under their names. Values and gradients are those of their own function, but
    for logarithms of ratios beyond ±20, which are cut. What no reduction reads (a token of loss mask 0) may be NaN.

    Raises: ArgumentError where the batch lacks what an option needs, and for an empty list of kept ids at a loss token;
    where masks are on a GPU, which a look would wait for, the loss is NaN then.
    """
    kept = _kept(args, batch)
    _, found = log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **kept,
    )
    _note(batch, found["log_probs"])
    logprobs, entropy = torch.cat(found["log_probs"]), torch.cat(found["entropy"])
    samples = samples_of(batch, logprobs.device)
    if kept:
        logprobs = logprobs + _lost(batch, samples)
    trained = _column(batch, "log_probs")
    trained = logprobs.detach() if trained is None else trained
    rollout = _column(batch, "rollout_log_probs")
    old = trained
    if args.use_rollout_logprobs:
        old = needed(rollout, "use_rollout_logprobs", "rollout_log_probs")

    weight = token_weights(sum_of_sample_mean, logprobs)
    off_policy = off_policy_of(args, batch, trained, rollout, weight, sum_of_sample_mean)
    weight, plain = off_policy.weight, weight
    surrogate_weight = weight
    if getattr(args, "custom_pg_loss_reducer_function_path", None) is not None:
        make = function_at(args.custom_pg_loss_reducer_function_path)
        reducer = make(
            batch["total_lengths"],
            batch["response_lengths"],
            off_policy.masks,
            args.calculate_per_token_loss,
        )
        surrogate_weight = token_weights(reducer, logprobs)

    read = (weight != 0) | (surrogate_weight != 0) | (plain != 0)

    def clean(x: Tensor) -> Tensor:
        return torch.where(read, x, 0.0)

    logprobs, entropy, old = clean(logprobs), clean(entropy), clean(old)
    if args.entropy_coef == 0:
        entropy = entropy.detach()
    given = torch.cat(list(batch["advantages"]))
    advantages = clean(given)
    gap = (old - logprobs).detach()
    mean_gap = None
    if args.use_opsm or args.advantage_estimator == "gspo":
        mean_gap = per_sample(gap, samples)
    reported: dict[str, Tensor] = {}
    scale = surrogate_weight * off_policy.importance
    if args.use_opsm and mean_gap is not None:
        held_back = (given < 0) & (mean_gap > args.opsm_delta)  # their metric counts masked tokens
        scale = torch.where(held_back, 0.0, scale)
        counts = per_token(samples.counts, samples.offsets, len(gap))
        reported["opsm_clipfrac"] = (held_back / counts).sum().float()

    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.advantage_estimator == "gspo" and mean_gap is not None:
        gap = mean_gap.float()
    surrogate = _surrogate(args, samples, logprobs, old, gap, scale * advantages, high)
    total = surrogate - args.entropy_coef * _sum(weight, entropy)
    if args.use_kl_loss:
        ref = needed(_column(batch, "ref_log_probs"), "use_kl_loss", "ref_log_probs")
        ratio = (logprobs - old).exp() if args.use_unbiased_kl else None
        kl = _sum(weight, approx_kl(logprobs, clean(ref), args.kl_loss_type, ratio))
        total = total + args.kl_loss_coef * kl
        reported["kl_loss"] = kl

    reported |= {
        "loss": total,
        "pg_loss": surrogate,
        "entropy_loss": _sum(weight, entropy),
        "pg_clipfrac": _sum(weight, _clipped(args, gap, advantages, high)),
        "ppo_kl": _sum(weight, gap),
    }
    if rollout is not None:
        ours = logprobs if args.use_rollout_logprobs else old
        reported["train_rollout_logprob_abs_diff"] = _sum(weight, (ours - clean(rollout)).abs())
    if off_policy.metrics is not None:
        reported["ois"] = _sum(plain, (-gap).exp())
        reported |= {k: _sum(plain, clean(x)) for k, x in off_policy.metrics.items()}
    if batch.get("opd_reverse_kl"):
        reported["opd_reverse_kl"] = _sum(weight, clean(torch.cat(list(batch["opd_reverse_kl"]))))
    return total, {name: x.detach().clone() for name, x in reported.items()}


def approx_kl(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, importance: Tensor | None = None
) -> Tensor:
    """Their estimates [N] of KL(policy ‖ reference), differentiated as they stand (Schulman 2020).

    With d = logprobs - ref_logprobs: k1 is d, k2 d² / 2, k3 exp(-d) - 1 + d, low_var_kl that within ±10.
    `importance`: [N] ratios that weigh them (DeepSeek-V3.2, section 3.1). Raises: ArgumentError for another kind.
    """
    check_name("vime", "kl_loss_type", kind, KL_KINDS)
    d = logprobs.float() - ref_logprobs.float()
    kl = d if kind == "k1" else d.square() / 2 if kind == "k2" else k3(d)
    if importance is not None:
        kl = importance * kl
    return kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl


def _surrogate(
    args: Any,
    samples: Samples,
    logprobs: Tensor,
    old: Tensor,
    gap: Tensor,
    advantages: Tensor,
    high: float,
) -> Tensor:
    """Σ of the clipped surrogate, of `advantages` [N] that carry the weights."""

    def of(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        cispo = args.advantage_estimator == "cispo"
        cu_loss = torch.tensor([0, len(logprobs)], device=logprobs.device, dtype=torch.int32)
        return policy_loss(
            logprobs,
            advantages,
            cu_loss,
            old,
            kind="cispo" if cispo else "ppo",
            aggregation="token_sum",
            per="token",
            clip_low=args.eps_clip,
            clip_high=high,
            dual_clip=None if cispo else getattr(args, "eps_clip_c", None),
        ).loss

    if args.advantage_estimator != "gspo":
        return of(logprobs, old, advantages)
    # The ratio of a sample is one number, so its gradient reaches each of its loss tokens with the mean of what all
    # of them weigh, and each rank can do its own tokens. Advantages above and below 0 are clipped at unlike ends, so
    # they are shared out apart.
    same = torch.zeros_like(gap)
    log_ratio = logprobs - logprobs.detach() - gap
    above, below = (
        of(log_ratio, same, spread(part, samples).to(gap.dtype))
        for part in (advantages.clamp(min=0), advantages.clamp(max=0))
    )
    slope = above + below
    return of(-gap, same, advantages) + (slope - slope.detach())


def _clipped(args: Any, gap: Tensor, advantages: Tensor, high: float) -> Tensor:
    """[N]: 1 where the clip changes a token's term."""
    ratio = (-gap).exp()
    within = ratio.clamp(1 - args.eps_clip, 1 + high)
    if args.advantage_estimator == "cispo":
        return (within != ratio).float()
    return (-within * advantages > -ratio * advantages).float()


def _kept(args: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The kept ids of a rollout with top-p, as keyword arguments."""
    if getattr(args, "rollout_top_p", 1.0) == 1.0:
        return {}
    ids = batch.get("rollout_top_p_token_ids")
    offsets = batch.get("rollout_top_p_token_offsets")
    if ids is None or offsets is None:
        raise ArgumentError(
            f"vime: rollout_top_p is {args.rollout_top_p}, and the batch has no rollout_top_p_token_ids (kept_ids). "
            "Fix: let the engine return these ids, or sample with --rollout-top-p 1"
        )
    for i, (mask, ends) in enumerate(zip(batch["loss_masks"], offsets, strict=False)):
        _refuse_empty(i, mask, torch.as_tensor(ends))
    return {"top_p_token_ids": ids, "top_p_token_offsets": offsets}


def _refuse_empty(i: int, mask: Tensor, offsets: Tensor) -> None:
    """Raise ArgumentError where a loss token's list is empty. Masks on a GPU are not looked at."""
    if mask.device.type != "cpu" or offsets.ndim != 1 or len(offsets) != len(mask) + 1:
        return
    for at in ((offsets.diff() == 0) & (mask != 0)).nonzero()[:1].flatten().tolist():
        raise ArgumentError(
            f"vime: the list of kept ids of sample {i}, response token {at} is empty, and its loss mask is not 0. "
            "Fix: pass the lists of the same sampling as the tokens"
        )


def _lost(batch: Mapping[str, Any], samples: Samples) -> Tensor:
    """[N]: NaN at a loss token whose list of kept ids is empty, which scores nothing; 0 elsewhere."""
    empty = [np.zeros(0, bool)]
    for ends, own in zip(batch["rollout_top_p_token_offsets"], samples.responses, strict=True):
        empty.append(np.diff(whole_numbers("top_p_token_offsets", "vime", ends))[own] == 0)
    device = samples.masks.device
    none = torch.from_numpy(np.concatenate(empty)).to(device, non_blocking=True)
    return torch.where(none & (samples.masks != 0), torch.nan, 0.0)


def _note(batch: Mapping[str, Any], log_probs: list[Tensor]) -> None:
    """Hand the logprobs to slime's dump for debugging, which is off unless it asked for them."""
    for module in backends():
        capture = getattr(module, "_maybe_capture_log_probs", None)
        if capture is not None:
            capture(batch, log_probs)


def _column(batch: Mapping[str, Any], name: str) -> Tensor | None:
    """A column of the micro-batch, [N]."""
    return torch.cat(list(batch[name])) if batch.get(name) else None


def _sum(weight: Tensor, terms: Tensor) -> Tensor:
    return (weight * terms).sum()
