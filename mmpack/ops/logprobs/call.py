"""One call of selected_logprobs: its inputs and options, and the statistics that its backward reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmpack.ops.logprobs.row_groups import RowGroups


class Call(NamedTuple):
    """Tensors first, then options: what the custom ops take, in this order."""

    logits: Tensor  # [T, V]
    targets: Tensor  # [N] int64 or int32
    # The three fields of RowGroups.
    rows: Tensor | None
    order: Tensor | None
    offsets: Tensor | None
    temperature: Tensor  # [] float64, see `runtime_scalar`
    entropy: bool
    gradient: str  # "dense", "compact" or "inplace"

    @property
    def groups(self) -> RowGroups:
        return RowGroups(self.rows, self.order, self.offsets)

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]


class Statistics(NamedTuple):
    """Per loss token, [N] each, in float32, or float64 for float64 logits."""

    logprobs: Tensor
    entropies: Tensor  # nats; [0] unless asked for
    maximum: Tensor  # of the row
    log_total: Tensor  # log of the sum of exp above the maximum


def runtime_scalar(value: float, device: torch.device) -> Tensor:
    """`value` as a tensor [] float64 on `device`, without waiting for the device.

    torch.compile makes a program per value of a float that reaches a custom op, and a CUDA graph keeps the first one.
    """
    if torch.compiler.is_compiling():
        # A product: a constant would be compiled in.
        return torch.ones((), dtype=torch.float64, device=device) * value
    return torch.full((), value, dtype=torch.float64, device=device)
