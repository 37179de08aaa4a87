"""mmpack::teacher_divergence for autograd and torch.compile: divergences and their derivatives in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.losses.distillation import TEACHER_DIVERGENCE
from mmpack.losses.distillation.call import Columns, Options
from mmpack.ops.custom_op import by_backend, define_op


class DivergenceFunction(torch.autograd.Function):
    """(divergences [N], masses [2, N]) from the Columns, one by one, and the Options; a gradient to the logprobs."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = call
        values, masses, slopes = divergence_op(*tensors, *options)
        columns = Columns(*tensors)
        ctx.save_for_backward(slopes, columns.offsets)
        ctx.dtype = columns.logprobs.dtype
        ctx.mark_non_differentiable(masses)
        ctx.set_materialize_grads(False)
        return values, masses

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ArgumentError(
                "teacher_divergence: create_graph=True asks for a second derivative, which it does not have. "
                "Fix: leave create_graph out"
            )
        if grad is None:
            return None, None, None, None
        slopes, offsets = ctx.saved_tensors
        tokens = Columns(slopes, slopes, offsets).tokens
        # A token without a gradient passes none on, whatever its slopes are.
        up = grad[tokens]
        product = torch.where(up == 0, 0.0, up * slopes)
        return product.to(ctx.dtype), None, None, None


def _fake(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, count = columns.logprobs, columns.offsets.shape[0] - 1
    return (
        logprobs.new_empty(count, dtype=torch.float64),
        logprobs.new_empty((2, count), dtype=torch.float64),
        torch.empty_like(logprobs, dtype=torch.promote_types(logprobs.dtype, torch.float32)),
    )


# Returns the divergences [N] and masses [2, N], float64, and the derivatives [M] of each token's own divergence:
# float32, or float64 where logprobs are.
divergence_op = define_op("teacher_divergence", by_backend(TEACHER_DIVERGENCE, "divergence"), _fake)
