"""The policy loss over compact loss tokens: logprobs [N], samples cut by cu_loss [B+1]; sums and terms in float64.

The op mmpack::policy_loss computes the derivatives with the loss, so the backward is one product: one launch forward
and one backward on a GPU, and nothing waits for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, LossWarning, callers_level, check_name, check_number
from mmpack.losses.aggregate import SAMPLE_MEAN, Aggregation, Total, denominator
from mmpack.losses.correction import Correction, CorrectionLevel, check_correction
from mmpack.losses.kl import KLKind, check_kl_kind
from mmpack.losses.policy import POLICY_LOSS
from mmpack.losses.policy.call import METRICS, Columns, Options, outputs_of
from mmpack.losses.policy.variants import VARIANTS, Kind
from mmpack.losses.samples import check_columns
from mmpack.notebook import Drawn
from mmpack.ops.custom_op import by_backend, define_op
from mmpack.ops.inputs import can_look_at, check_are_tensors

WHAT = "policy_loss"
Per = Literal["sample", "token"]
_UNITS = {"sample": "sample", "token": "loss token"}
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


@dataclass(frozen=True)
class PolicyLoss(Drawn):
    """A loss to call `.backward()` on, and what to log about it."""

    loss: Tensor  # scalar float32
    # Scalars float32, detached: means over this batch's loss tokens, 0 where it has none.
    metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    cu_loss: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    kind: Kind = "grpo",
    aggregation: Aggregation = "token_mean",
    total_tokens: Total | None = None,
    total_samples: Total | None = None,
    scale: float = 1.0,
    *,
    per: Per | None = None,
    max_tokens: int | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    correction: Correction | None = None,
    correction_level: CorrectionLevel = "token",
    correction_low: float = 0.0,
    correction_high: float = 2.0,
) -> PolicyLoss:
    """scale · aggregate(w · surrogate + kl_coef · KL - entropy_coef · entropy).

    With the ratio r = exp(logprobs - old_logprobs) and A the advantage, the surrogate of a token is

    - `grpo`, `dr_grpo`, `ppo`, `dapo`: -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) (PPO, arXiv 1707.06347
      eq. 7). They differ in clip, advantage and aggregation; `dapo` clips higher.
    - `gspo`: the same with the sample's ratio s = exp(mean of logprobs - old_logprobs) for its value, and the
      token's logprob for its gradient (arXiv 2507.18071 section 4.3). With a `correction` of tokens each gradient is
      weighed by its own token's w, as verl does; TRL weighs all of a sample's by their mean.
    - `cispo`: -clip(r, 1 - clip_low, 1 + clip_high)·A·logprobs, the clipped weight detached (arXiv 2506.13585
      section 3.1).
    - `gmpo`: -A times the geometric mean of the sample's ratios, each one's logarithm clipped to [-clip_low, clip_high]
      where that lowers the gain (arXiv 2507.20673 eq. 4); a clipped token has no gradient. Advantages are of samples.
      A `correction` of tokens weighs each token's gradient; verl weighs by the geometric mean of a sample's weights.

    What a kind decides is the surrogate and the clip. The aggregation is the one named here, whatever the kind; the
    papers' own are `sequence_mean_token_mean` for grpo, gspo and gmpo, `token_mean` for dapo, cispo and ppo,
    `sequence_mean_token_sum_norm` for dr_grpo. See `aggregate` for names, totals and max_tokens.

    Args:
        logprobs: [N] float, of the policy in training, natural log.
        advantages: [B], one per sample, or [N], one per loss token.
        per: `sample` or `token`, what advantages are; None: by their shape. Where N = B and a sample has no loss token
            the shape does not say it: an error, but on a GPU, where nothing is read, they are one per sample.
        cu_loss: [B+1] int32, `PackedBatch.cu_loss`.
        old_logprobs: [N], of the policy that the ratio starts from; None: logprobs.detach(), a ratio of 1.
        ref_logprobs: [N], needed by kl_coef; without it only logged.
        rollout_logprobs: [N], of the engine that sampled, needed by correction; without it a LossWarning, for they
            are not read.
        total_tokens, total_samples: of the global batch, over all micro-batches and ranks; None: this batch's.
        scale: undoes gradient averaging, e.g. the number of data-parallel ranks.
        clip_low, clip_high: None: the kind's own, `VARIANTS`; infinite: no clip.
        dual_clip: c > 1, verl's `clip_ratio_c`: where A < 0 the surrogate is at most -c·A, and a ratio above c has no
            gradient (arXiv 1912.09729 eq. 5). TRL's `delta` is the same where it is above 1 + clip_high. Not
            of cispo and gmpo.
        kl_kind: `k1`, `k2`, `k3`, see `kl_divergence`.
        entropy: [N] in nats, of the rows that the logprobs were read from; needed by entropy_coef.
        correction: `tis` or `mis`: weight w of the surrogate, see `correction_weights`; None: w = 1.

    Gradients reach the logprobs, and the entropy where entropy_coef is not 0; all else is a constant. A second
    derivative, forward mode and torch.func raise.

    Logarithms of ratios are cut to ±20 before exp; a cut ratio has no gradient, except in cispo. N = 0 gives a
    zero that is attached to the graph.

    Metrics: `tokens` (a count), `ratio` (of tokens; of samples for gspo and gmpo), `clip_fraction` (share of tokens
    whose ratio the clip cut), `kl_old` (KL(old ‖ policy), k3), `ess`, `kl_ref`, `entropy`, `correction` and
    `correction_fraction` (mean weight; share of tokens cut or masked), `dual_clip_fraction` (share of tokens that
    dual_clip cut, verl's pg_clipfrac_lower), the last five where their input is given.
    `ess` is Kish's effective sample size as a share of the tokens, (Σw)² / (N · Σw²), of the weights `correction`
    where one is given, cut or masked as they are, else of `ratio` before the clip: 1 where all weigh the same.

    Raises ArgumentError for shapes that don't fit, unknown names, numbers out of their range, totals below this
    batch's own, inputs that a coefficient needs, options of a term that is not there, and NaN in the columns given
    with the logprobs. Tensors on a GPU are not read.

    Example: two samples of two loss tokens and one.
        >>> import torch
        >>> import mmpack as mp
        >>> logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        >>> cu_loss = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> out = mp.policy_loss(logprobs, torch.tensor([0.5, -2.0]), cu_loss)
        >>> out.loss.backward()
        >>> logprobs.grad
        tensor([-0.1667, -0.1667,  0.6667])
    """
    given = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "entropy": entropy,
    }
    check_columns(WHAT, cu_loss, given, optional=[name for name in given if name != "logprobs"])
    count, num_samples = len(logprobs), len(cu_loss) - 1
    _check_advantages(advantages, cu_loss, count, per)
    if per == "token" and count == num_samples:
        advantages = torch.cat([advantages, advantages[:1]])  # longer than B: read by token
    low, high = _clip(kind, clip_low, clip_high, dual_clip)
    if VARIANTS[kind].per_sample and (per == "token" or len(advantages) != num_samples):
        raise ArgumentError(
            f"{WHAT}: advantages are per loss token, but {kind} weighs whole samples. Fix: pass one per sample"
        )
    for option, number in (("scale", scale), ("kl_coef", kl_coef)):
        check_number(WHAT, option, number, least=0)
    check_number(WHAT, "entropy_coef", entropy_coef)
    check_kl_kind(kl_kind)
    check_correction(correction, correction_level, correction_low, correction_high)
    _check_numbers({"advantages": advantages, **given})
    _check_needed(
        {**given, "correction": correction},
        ("kl_coef", kl_coef, 0, "ref_logprobs"),
        ("kl_kind", kl_kind, "k3", "ref_logprobs"),
        ("entropy_coef", entropy_coef, 0, "entropy"),
        ("correction", correction, None, "rollout_logprobs"),
        ("correction_level", correction_level, "token", "correction"),
        ("correction_low", correction_low, 0, "correction"),
        ("correction_high", correction_high, 2, "correction"),
    )
    if rollout_logprobs is not None and correction is None and not torch.compiler.is_compiling():
        warnings.warn(
            f"{WHAT}: rollout_logprobs are given, correction is None, so they are not read and the gap between "
            "engine and trainer stays in the gradient. Fix: pass correction='tis', or leave them out",
            LossWarning,
            stacklevel=callers_level(),
        )
    total, factor = denominator(
        aggregation, count, num_samples, total_tokens, total_samples, max_tokens
    )
    scale = scale / factor
    on_device = None
    if isinstance(total, Tensor):
        on_device = total.to(logprobs.device, non_blocking=logprobs.is_cuda)
    else:
        scale = scale / max(total, 1)

    columns = Columns(
        logprobs,
        entropy if entropy_coef else _constant(entropy),
        _constant(advantages),
        cu_loss,
        _constant(old_logprobs),
        _constant(ref_logprobs),
        _constant(rollout_logprobs),
        on_device,
    )
    options = Options(
        scale,
        aggregation == SAMPLE_MEAN,
        VARIANTS[kind].surrogate.__name__,
        low,
        high,
        math.inf if dual_clip is None else dual_clip,
        kl_kind,
        kl_coef,
        entropy_coef,
        correction,
        correction_level,
        correction_low,
        correction_high,
    )
    loss, values = PolicyLossFunction.apply(*columns, options)
    absent = {
        "kl_ref": ref_logprobs is None,
        "entropy": entropy is None,
        "correction": correction is None,
        "correction_fraction": correction is None,
        "dual_clip_fraction": dual_clip is None,
    }
    metrics = zip(METRICS, values.unbind(), strict=True)
    return PolicyLoss(loss, {name: value for name, value in metrics if not absent.get(name)})


def _check_advantages(advantages: Tensor, cu_loss: Tensor, count: int, per: Per | None) -> None:
    check_are_tensors(WHAT, advantages=advantages)
    if advantages.is_complex():
        raise ArgumentError(f"{WHAT}: advantages are {advantages.dtype}. Fix: pass real numbers")
    if per is not None:
        check_name(WHAT, "per", per, get_args(Per))
    num_samples = len(cu_loss) - 1
    sizes = {"sample": num_samples, "token": count}
    if tuple(advantages.shape) not in {(sizes[name],) for name in ([per] if per else sizes)}:
        expected = [
            f"[{size}] (one per {_UNITS[name]})"
            for name, size in sizes.items()
            if per in (None, name)
        ]
        raise ArgumentError(
            f"{WHAT}: advantages has shape {list(advantages.shape)}, expected {' or '.join(expected)}. "
            "Fix: pass the advantages of this batch's samples, in its order"
        )
    if advantages.device != cu_loss.device:
        raise ArgumentError(
            f"{WHAT}: advantages are on {advantages.device}, cu_loss on {cu_loss.device}. Fix: move both to one device"
        )
    alike = per is None and count == num_samples and can_look_at(cu_loss)
    if alike and bool((cu_loss[1:] == cu_loss[:-1]).any()):
        raise ArgumentError(
            f"{WHAT}: advantages [{count}] are one per sample or one per loss token, here both are {count}, and "
            "a sample has no loss token. Fix: choose with per='sample' or per='token'"
        )


def _clip(
    kind: Kind, clip_low: float | None, clip_high: float | None, dual_clip: float | None
) -> tuple[float, float]:
    """The clip's bounds: by the distances given, else by the kind's own."""
    check_name(WHAT, "kind", kind, get_args(Kind))
    for option, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        if bound is not None:
            check_number(WHAT, option, bound, least=0, finite=False)
    if dual_clip is not None:
        check_number(WHAT, "dual_clip", dual_clip, above=1, fix="pass c > 1, or None for none")
    given = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    for option, why in VARIANTS[kind].refuses.items():
        if given[option] is not None:
            raise ArgumentError(f"{WHAT}: {option} is {given[option]}, but {kind} {why}")
    low, high = VARIANTS[kind].clip
    low, high = low if clip_low is None else clip_low, high if clip_high is None else clip_high
    return (-low, high) if VARIANTS[kind].of_log else (1 - low, 1 + high)


def _check_numbers(given: Mapping[str, Tensor | None]) -> None:
    """Raise ArgumentError for NaN, and infinite advantages, where looking doesn't wait for a GPU."""
    for name, column in given.items():
        if name in ("logprobs", "entropy") or column is None or not can_look_at(column):
            continue
        bad = ~column.isfinite() if name == "advantages" else column.isnan()
        if bool(bad.any()):
            at = int(bad.nonzero()[0, 0])
            raise ArgumentError(
                f"{WHAT}: {name}[{at}] is {column[at].item()}, and so would the loss be. "
                "Fix: find it where it is computed"
            )


def _check_needed(given: Mapping[str, Any], *options: tuple[str, Any, Any, str]) -> None:
    """Raise ArgumentError for an option (name, value, default) of a term whose input is not there."""
    for option, value, default, needs in options:
        if value != default and given[needs] is None:
            raise ArgumentError(
                f"{WHAT}: {option} is {value!r}, but {needs} is None. Fix: pass {needs}, or leave {option} out"
            )


def _constant(column: MaybeTensor) -> MaybeTensor:
    """Without its graph, so that a loss that reaches no logprob requires no gradient."""
    return column.detach() if column is not None and column.requires_grad else column


class PolicyLossFunction(torch.autograd.Function):
    """(loss, metrics) from the Columns, one by one, and the Options; with gradients to logprobs and entropy."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        *columns, options = call
        loss, metrics, derivatives = policy_loss_op(*columns, *options)
        ctx.save_for_backward(derivatives)
        ctx.dtypes = [None if x is None else x.dtype for x in columns[:2]]
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)  # no launch for the zeros of metrics
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ArgumentError(
                "policy_loss: create_graph=True asks for a second derivative, which it does not have. "
                "Fix: leave create_graph out"
            )
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        for i, product in enumerate((ctx.saved_tensors[0] * grad).unbind()):
            if ctx.needs_input_grad[i]:
                grads[i] = product.to(ctx.dtypes[i])
        return tuple(grads)


def _fake(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, outputs = columns.logprobs, outputs_of(options)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return (
        logprobs.new_empty((), dtype=torch.float32),
        logprobs.new_empty(len(METRICS), dtype=torch.float32),
        logprobs.new_empty((outputs, len(logprobs)), dtype=dtype),
    )


# Returns the loss [], METRICS [10], and the derivatives of the loss: [1, N] to logprobs, with an entropy_coef [2, N] to
# logprobs and entropy. Loss and metrics are float32; derivatives too, or float64 where logprobs are.
policy_loss_op = define_op("policy_loss", by_backend(POLICY_LOSS, "policy_loss"), _fake)
