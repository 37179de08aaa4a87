"""segment_returns in plain PyTorch and float64, on anything: what the kernel is to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.segments import segment_ids, suffix_scan


def segment_returns(
    rewards: Tensor,
    values: Tensor | None,
    bootstrap: Tensor | None,
    cu: Tensor,
    gamma: float,
    decay: float,
    wide: bool = False,
) -> Tensor:
    """Arguments and results of mmpack::segment_returns."""
    count = len(rewards)
    reward, value = rewards.double(), None if values is None else values.double()
    segment = segment_ids(cu, count)
    stop = cu.long()[1:][segment]
    last = torch.arange(count, device=cu.device) + 1 == stop
    after = torch.zeros_like(reward) if bootstrap is None else bootstrap.double()[segment]
    following = torch.where(last, after, 0.0 if value is None else value.roll(-1))
    terms = reward + gamma * following
    # a GPU would wait for its longest segment
    longest = int(cu.diff().max()) if cu.device.type == "cpu" and len(cu) > 1 else None
    scanned = suffix_scan(terms if value is None else terms - value, stop, decay, longest)
    out = torch.stack([scanned] if value is None else [scanned, scanned + value])
    return out if wide else out.float()
