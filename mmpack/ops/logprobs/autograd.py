"""What autograd keeps of a forward of either op, and what it hands to the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Incoming(NamedTuple):
    """Gradients that come in, per loss token."""

    grad_logprobs: Tensor  # [N]
    grad_entropies: Tensor | None  # [N]


def keep(
    ctx: Any, tensors: Sequence[Tensor | None], output: tuple[Tensor, ...], entropy: bool
) -> None:
    """Save a forward's tensors and output. The output begins with logprobs and entropies, which have gradients."""
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2 if entropy else 1 :])
    ctx.set_materialize_grads(False)


def incoming(
    logprobs: Tensor, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, entropy: bool
) -> Incoming:
    """The gradients from autograd, which are None for an output that was not used."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(logprobs)
    return Incoming(grad_logprobs, grad_entropies if entropy else None)
