"""The most bytes of tensors that lived at once in a block: new storages, from the op that makes them until they die."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """`peak` of those made within the block; on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if torch.is_tensor(x)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in given | self._seen:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._seen.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size
