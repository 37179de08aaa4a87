"""Softmax statistics of a chunk of rows [C, V].

Maximum and log of the sum stay separate: their sum would round away 1e-3 at logits of 1e4. The maximum is subtracted
before the temperature divides, for the same reason.
"""

from __future__ import annotations

from torch import Tensor

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
