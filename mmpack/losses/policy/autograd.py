"""mmpack::policy_loss for autograd and torch.compile: the loss, its metrics and its derivatives in one pass.

The derivatives come with the forward, so the backward is one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.losses.policy import POLICY_LOSS
from mmpack.losses.policy.call import METRICS, Columns, Options, outputs_of
from mmpack.ops.custom_op import by_backend, define_op


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
