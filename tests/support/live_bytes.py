"""Bytes of the tensors that live at once, counted by storage as torch makes and frees them. What a custom op makes
within itself is not seen."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes(known) as live: …`; then `live.peak`, without the storages of `known` tensors."""

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {_key(x) for x in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _key(x) not in given:
                self._watch(x.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
