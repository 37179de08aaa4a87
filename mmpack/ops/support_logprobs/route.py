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
# H200: cuBLAS 690 TFLOP/s in bf16 (docs/performance/linear_selected_logprobs.md), gathers 3.85 TB/s
# (docs/performance/gather_rows.md). A list of V / 179 ids then costs as much as all V: 850 of 152,064.
BFLOAT16 = 179.0
# float16 and float32 are multiplied in float32: 60 of the 67 TFLOP/s of the data sheet, gathers as above.
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
