"""The op mmpack::segment_returns: the suffix scan that returns and GAE share, float64 inside.

On each segment of cu, with d = rewards (values absent) or rewards + gamma · the next value − value:
out[0, t] = sum over k of decay^k · d[t + k]; with values out[1] = out[0] + values. The next value of a segment's last
element is its bootstrap (0 without one); without values gamma · bootstrap is added to the last reward. Results are
float32, or `wide` as summed: a group's returns may be closer to each other than float32 tells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.losses.returns import SEGMENT_RETURNS
from mmpack.ops.custom_op import by_backend, define_op


def _fake(
    rewards: Tensor,
    values: Tensor | None,
    bootstrap: Tensor | None,
    cu: Tensor,
    gamma: float,
    decay: float,
    wide: bool,
) -> Tensor:
    dtype = torch.float64 if wide else torch.float32
    return rewards.new_empty((1 if values is None else 2, len(rewards)), dtype=dtype)


# rewards, values [N] and bootstrap [B]: floats; cu [B+1]. Result: [1, N] float32 (wide: float64), [2, N] with values.
scan_op = define_op("segment_returns", by_backend(SEGMENT_RETURNS, "segment_returns"), _fake)
