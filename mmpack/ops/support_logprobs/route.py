"""Whether rows of the head are gathered, or the whole head is multiplied: the cheaper by the bytes of all lists.

Gathering moves M rows of the head, three times in a step (forward; gradients to hidden and to weight). Multiplying
takes three products of N rows and the whole head. Both grow with H, so what counts is the mean length of a list, M / N,
beside V.
"""

from __future__ import annotations

import torch

from mmpack.ops import invariance
from mmpack.ops.backend import choose
from mmpack.ops.support_logprobs import SUPPORT_LOGPROBS

# Operations of a product in the time in which one byte is gathered.
# H200, measured (benchmarks/results/support.md): lists of 1,024 are gathered in 20.4 ms and lists of 2,048 in 40.5 ms,
# products take 24.6 ms. A list of V / 123 ids costs as much as all V: 1,236 of 152,064.
BFLOAT16 = 123.0
# float16 and float32 are multiplied in float32: 60 of the 67 TFLOP/s of the data sheet, gathers at 3.85 TB/s
# (benchmarks/results/gather_rows.md).
FLOAT32 = 16.0
# One core: from lists of V / 128 ids on, products take less time.
CPU = 64.0


def by_products(
    tokens: int, entries: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether multiplying the whole head is cheaper, for `entries` ids in the lists of `tokens` loss tokens.

    Within `mmpack.invariant` it is never asked for: bits would follow from the other lists of the batch.
    """
    if invariance.is_on():
        return False
    rate = CPU if device.type == "cpu" else BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    return entries * dtype.itemsize * rate > 2 * tokens * vocab


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Not in torch on a GPU: where the lists of some tokens begin and end is not known on the host."""
    return device.type == "cpu" or choose(SUPPORT_LOGPROBS, device, dtype) != "torch"
