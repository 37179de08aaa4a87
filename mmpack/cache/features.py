"""FeatureStore: each medium's features, by cache key, of a tower whose weights stay.

What a step needs several times (old, reference and policy passes, epochs over a batch, micro-batches that share
prompts) is encoded once. Features of a medium are one tensor [levels, tokens, H].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock
from weakref import WeakSet, ref

import torch
from torch import Tensor

from mmpack.cache.tower import Digest, Levels, Tower
from mmpack.errors import ModelError, check_whole


@dataclass
class FeatureStats:
    """Counts of a store since it was made, and the bytes that it holds now."""

    hits: int = 0
    misses: int = 0
    spilled: int = 0  # media moved from the device to the host
    restored: int = 0  # and back: these are hits too
    dropped: int = 0  # media that no budget had room for
    patches_encoded: int = 0
    patches_saved: int = 0  # that the tower would have run without the store
    device_bytes: int = 0
    host_bytes: int = 0


class FeatureStore:
    """Cache of features: at most `max_bytes` on the device and `host_bytes` in the host's memory.

    What was used least recently leaves the device first: to the host (page-locked memory if there is an accelerator),
    where there is room, and comes back without waiting. Features that a pass under way reads don't count towards the
    budget.

    A store is of one tower: weights, and nothing else, decide. Before each pass the weights' values are looked at;
    if they changed, by whatever means, it raises until `clear()`. Another model with an equal tower, a frozen
    reference for one, may use the same store: equality is proved once (`torch.equal`). Autocast, attention, hooks,
    adapters switched on or off and their scales give features of their own. Dropout is refused.

    Args: both budgets in bytes; 0 holds nothing. Raises: ArgumentError for what is no such number.
    """

    def __init__(self, max_bytes: int, host_bytes: int = 0):
        check_whole("FeatureStore", "max_bytes", max_bytes, least=0)
        check_whole("FeatureStore", "host_bytes", host_bytes, least=0)
        self.max_bytes, self.host_bytes = int(max_bytes), int(host_bytes)
        self.stats = FeatureStats()
        self._lock = RLock()  # threads take turns
        self._device: OrderedDict[Hashable, Tensor] = OrderedDict()  # the next to leave comes first
        self._host: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._digest: Digest | None = None
        self._first: list[ref[torch.nn.Module]] = []  # the tower that the features are of
        self._proven: WeakSet[torch.nn.Module] = WeakSet()  # the first module of each equal one

    def __repr__(self) -> str:
        held = len(self._device) + len(self._host)
        return (
            f"FeatureStore({held} media, {self.stats.device_bytes:,} of {self.max_bytes:,} bytes)"
        )

    def clear(self) -> None:
        """Forget all features, and whose they are. Counts stay."""
        with self._lock:
            self._device.clear()
            self._host.clear()
            self.stats.device_bytes = self.stats.host_bytes = 0
            self._digest, self._first, self._proven = None, [], WeakSet()

    def fits(self, tower: Tower) -> bool:
        """Return whether features of this tower, as its weights are now, may come from this store and go into it."""
        return self._digest in (None, tower.digest())

    def fetch(
        self,
        tower: Tower,
        keys: Sequence[str],
        patches: Sequence[int],
        encode: Callable[[list[int]], list[Levels]],
    ) -> list[Levels]:
        """Features of each medium, without gradients; what is not held is encoded, by one call.

        Args: `keys`, `patches`: of each medium. `encode`: indices into them -> levels of each.
        Raises: ModelError for a tower that is trained, has changed, differs, or is random.
        """
        if tower.trains:
            raise ModelError(
                "FeatureStore: the tower is being trained, but stored features carry no gradient to it. Fix: "
                "use mmpack.adapters.transformers.encode_once, or call requires_grad_(False) on the tower, "
                "projector included"
            )
        tower.refuse_random("FeatureStore")
        # ordinary tensors, which later passes may save for their backward
        with self._lock, torch.inference_mode(False), torch.no_grad():
            return self._fetched(tower, keys, patches, encode)

    def find(self, tower: Tower, keys: Sequence[str]) -> list[Levels | None]:
        """Features of each medium that is held, None of the others; nothing is encoded, and no count changes.

        Raises: as `fetch` does, but for a tower that is trained.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._digest is not None:
                self._check(tower)
            how = tower.how()
            found = [self._found((key, how)) for key in keys]
            return [None if f is None else f.unbind(0) for f in found]

    def _fetched(
        self,
        tower: Tower,
        keys: Sequence[str],
        patches: Sequence[int],
        encode: Callable[[list[int]], list[Levels]],
    ) -> list[Levels]:
        self._check(tower)
        how = tower.how()
        held = {key: self._found((key, how)) for key in keys}
        found = {key: features for key, features in held.items() if features is not None}
        at = {key: i for i, key in enumerate(keys) if key not in found}
        if at:
            made = encode(list(at.values()))
            for key, levels in zip(at, made, strict=True):
                found[key] = torch.stack(levels)  # alone: a view would hold the whole chunk
                self._keep((key, how), found[key])
        self.stats.misses += len(at)
        self.stats.hits += len(keys) - len(at)
        encoded = sum(patches[i] for i in at.values())
        self.stats.patches_encoded += encoded
        self.stats.patches_saved += sum(patches) - encoded
        return [found[key].unbind(0) for key in keys]

    def _check(self, tower: Tower) -> None:
        """Raise ModelError unless the features are of this tower as it is now."""
        digest, key = tower.digest(), tower.modules[0]
        if self._digest is None:
            self._digest, self._first = digest, [ref(m) for m in tower.modules]
        elif digest != self._digest:
            if key in self._proven:
                raise ModelError(
                    "FeatureStore: the tower's weights changed since its features were made. "
                    "Fix: call store.clear() after the change, or use a new FeatureStore"
                )
            raise ModelError(
                "FeatureStore: its features come from another tower, with other weights. "
                "Fix: keep a FeatureStore for each model"
            )
        elif key not in self._proven:
            self._prove(tower)
        self._proven.add(key)

    def _prove(self, tower: Tower) -> None:
        modules = [m() for m in self._first]
        held = [m for m in modules if m is not None]
        if len(held) < len(modules) or not Tower(tuple(held)).equals(tower):
            raise ModelError(
                "FeatureStore: the tower that its features come from changed or is gone, so this tower can't "
                "be compared with it. Fix: call store.clear(), or keep a FeatureStore per model"
            )

    def _found(self, name: Hashable) -> Tensor | None:
        features = self._device.get(name)
        if features is not None:
            self._device.move_to_end(name)
        elif name in self._host:
            held = self._host.pop(name)
            self.stats.host_bytes -= held.nbytes
            self.stats.restored += 1
            features = held.to(name[1][0], non_blocking=True)  # type: ignore[index]
            self._keep(name, features)
        return features

    def _keep(self, name: Hashable, features: Tensor) -> None:
        self._device[name] = features
        self.stats.device_bytes += features.nbytes
        while self.stats.device_bytes > self.max_bytes:
            oldest, held = self._device.popitem(last=False)
            self.stats.device_bytes -= held.nbytes
            self._spill(oldest, held)

    def _spill(self, name: Hashable, features: Tensor) -> None:
        if features.nbytes > self.host_bytes:
            self.stats.dropped += 1
            return
        while self.stats.host_bytes + features.nbytes > self.host_bytes:
            _, oldest = self._host.popitem(last=False)
            self.stats.host_bytes -= oldest.nbytes
            self.stats.dropped += 1
        self._host[name] = _on_host(features)
        self.stats.host_bytes += features.nbytes
        self.stats.spilled += 1


def _on_host(features: Tensor) -> Tensor:
    """Copy to the host without waiting: what reads it later is queued behind the copy, on the same stream."""
    if features.device.type == "cpu":
        return features
    held = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
    return held.copy_(features, non_blocking=True)
