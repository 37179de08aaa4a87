"""Sequences of different lengths, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Lengths(NamedTuple):
    """S sequences of queries, and the keys of each; causal is bottom-right, else every query sees every key.

    `window`: a query sees no key so many places or more before itself. The last query stands at the last key.
    """

    cu_seqlens_q: torch.Tensor  # [S+1] int32
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: int | None = None
