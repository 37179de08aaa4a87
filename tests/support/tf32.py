"""float32 products that are float32 on a GPU too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """By hand: these attributes are computed, and `monkeypatch` would delete them to put them back."""
    holders = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [holder.allow_tf32 for holder in holders]
    for holder in holders:
        holder.allow_tf32 = False
    try:
        yield
    finally:
        for holder, allowed in zip(holders, before, strict=True):
            holder.allow_tf32 = allowed
