"""Softmax statistics of a chunk of rows [C, V], and their gradient.

Maximum and log of the sum are kept apart: their sum would round away 1e-3 at logits of 1e4. Differences from the
maximum are taken before the temperature divides them, for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.logprobs.row_groups import RowGradients, Slots

ALIGN = 32  # columns: every row starts at an aligned address, so its bits don't depend on its place
LOWEST = -1e30  # stands for -inf where it is multiplied with a probability of 0


def pad_columns(vocab: int) -> int:
    return -vocab % ALIGN


def row_statistics(
    logits: Tensor, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Maximum, log of the sum of exp, and entropy (nats), [C] each. Overwrites `logits`."""
    maximum = logits.amax(-1)
    shifted = logits.sub_(maximum[:, None]).div_(temperature)
    if not entropy:
        return maximum, shifted.exp().sum(-1).log(), None
    weight = shifted.clamp_(min=LOWEST).exp()
    total = weight.sum(-1)
    log_total = total.log()
    return maximum, log_total, log_total - weight.mul_(shifted).sum(-1) / total


def row_gradient(
    logits: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    entropy: Tensor | None,
    gradients: RowGradients,
    chunk: slice,
    temperature: float | Tensor,
) -> Tensor:
    """Gradient [C, V] to the logits but for the targets' own part; 0 for rows that no gradient reaches.

    With p the softmax: d logp_t = onehot_t - p, d H = -p · (log p + H).
    """
    dtype = logits.dtype
    logprobs = logits.sub_(maximum[:, None]).div_(temperature).sub_(log_total[:, None])
    along = gradients.logprob[chunk].to(dtype)[:, None]
    if entropy is None:
        grad = logprobs.exp_().mul_(-along / temperature)
    else:
        p = logprobs.clamp_(min=LOWEST).exp()
        from_entropy = gradients.entropy[chunk].to(dtype)[:, None]
        grad = logprobs.add_(entropy[:, None]).mul_(from_entropy).add_(along).mul_(p)
        grad.div_(-temperature)
    return grad.masked_fill_(~gradients.live[chunk, None], 0.0)


def target_gradient(
    logprobs: Tensor,
    entropy: Tensor | None,
    gradients: RowGradients,
    slots: Slots,
    temperature: float | Tensor,
) -> Tensor:
    """The whole gradient [N] float64 to the logit of each target; entries of one row and target are equal in bits."""
    logprobs = logprobs.double()
    along = gradients.logprob[slots.of]
    # Where a row has one target this is -expm1(logp) · g, which keeps its digits as p nears 1.
    grad = (gradients.target - along) - torch.expm1(logprobs) * along
    if entropy is not None:
        finite = logprobs.clamp(min=LOWEST)
        from_entropy = gradients.entropy[slots.of]
        grad = grad - finite.exp() * (finite + entropy.double()[slots.of]) * from_entropy
    return torch.where(gradients.live[slots.of], grad / temperature, 0.0)
