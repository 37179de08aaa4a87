"""The op mmpack::policy_loss: the loss, its metrics and its derivatives in one pass over N loss tokens.

The derivatives come with the forward, so the backward is one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.losses.policy import POLICY_LOSS
from mmpack.losses.policy.torch import METRICS
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op

# The sum of the terms (with sample_mean, of the samples' means) times scale / max(total, 1); no total: 1. An infinite
# dual_clip is none. Returns loss [], METRICS [10], and the derivatives of the loss: [1, N] to logprobs, with an
# entropy_coef [2, N] to logprobs and entropy. Loss and metrics are float32, derivatives too, or float64 where logprobs
# are.
SCHEMA = """policy_loss(
    Tensor logprobs, Tensor? entropy, Tensor advantages, Tensor cu_loss,
    Tensor? old_logprobs, Tensor? ref_logprobs, Tensor? rollout_logprobs,
    Tensor? total, float scale, bool sample_mean,
    str kind, float ratio_low, float ratio_high, float dual_clip,
    str kl_kind, float kl_coef, float entropy_coef,
    str? correction, str correction_level, float correction_low, float correction_high
) -> (Tensor, Tensor, Tensor)"""
ENTROPY_COEF = 16  # its place in the schema


class PolicyLossFunction(torch.autograd.Function):
    """(loss, metrics) from the arguments of the op, with gradients to the first two."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, metrics, derivatives = policy_loss_op(*arguments)
        ctx.save_for_backward(derivatives)
        ctx.dtypes = [None if x is None else x.dtype for x in arguments[:2]]
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)  # no launch for the zeros of metrics
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ArgumentError(
                "policy_loss: its gradient is asked for with create_graph=True, and it has no second derivative. "
                "Fix: leave create_graph out"
            )
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        for i, product in enumerate((ctx.saved_tensors[0] * grad).unbind()):
            if ctx.needs_input_grad[i]:
                grads[i] = product.to(ctx.dtypes[i])
        return tuple(grads)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    module = implementation(POLICY_LOSS, arguments[0].device)
    results: tuple[Tensor, Tensor, Tensor] = module.policy_loss(*arguments)
    return results


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = arguments[0]
    derivatives = (2 if arguments[ENTROPY_COEF] else 1, len(logprobs))
    return (
        logprobs.new_empty((), dtype=torch.float32),
        logprobs.new_empty(len(METRICS), dtype=torch.float32),
        logprobs.new_empty(derivatives, dtype=torch.promote_types(logprobs.dtype, torch.float32)),
    )


policy_loss_op = define_op(SCHEMA, _run, _fake)
