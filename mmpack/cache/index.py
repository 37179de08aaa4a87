"""PrefixIndex: which prefixes are held, and where: KV rows, packed rows, and names in the feature store (numpy).

It holds no tensor. Blocks of `block_size` tokens are found by key (`mmpack.cache.keys`); block k of the store has the
KV rows [k · block_size, (k + 1) · block_size).
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.cache.keys import PrefixKeys, prefix_keys, whole_numbers
from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.schema.sample import Sample

if TYPE_CHECKING:
    from mmpack.cache.features import FeatureStore

# rows [start, stop) of a pack, by the caller's name of the pack
PackedRows = tuple[Hashable, int, int]


@dataclass
class PrefixStats:
    """Counts of an index since it was made, in tokens and blocks, and what it holds now."""

    asked_tokens: int = 0
    hit_tokens: int = 0
    added: int = 0  # blocks
    evicted: int = 0
    left_out: int = 0  # blocks that the budget had no room for
    held: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Hit:
    """The cached part of a sample: its first `tokens` tokens.

    `rows`: int64 [tokens], of the KV store. `packed`: rows of packs where its tokens lay, those that were told.
    `media`: names of the media in it, as the feature store has them.
    """

    tokens: int
    rows: np.ndarray
    packed: tuple[PackedRows, ...]
    media: tuple[str, ...]


@dataclass(frozen=True)
class Reservation:
    """Tokens [start, stop) of a sample, to be written to `rows` (int64) of the KV store."""

    start: int
    stop: int
    rows: np.ndarray


@dataclass(eq=False)
class _Block:
    number: int
    refs: int = 0
    packed: tuple[PackedRows, ...] = field(default=())


class PrefixIndex:
    """Index of at most `max_bytes` of KV, in blocks; evicts unheld blocks, least recently used first.

    The end of a prefix is evicted before its beginning.

    A block is found only once what it names is written (`reserve`), and stays while it is held (`hold`). Threads may
    share an index. A process has its own: one that is forked or unpickled begins empty, for its KV is its own too.

    Args:
        max_bytes: of the KV store. `capacity` is how many blocks that is.
        bytes_per_token: of all KV layers together: layers that share their KV count once.
        block_size: tokens.
        features: the step's feature store, which `features_of` reads.
    Raises: ArgumentError for numbers that are none, and for a budget below one block.

    Example:
        >>> import mmpack as mp
        >>> from mmpack.cache import PrefixIndex
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> a, b = [
        ...     mp.Sample.from_dict(text | {"sample_id": str(k), "input_ids": [5, 6, 7, 8, k], "loss_spans": []})
        ...     for k in range(2)
        ... ]
        >>> index = PrefixIndex(max_bytes=4096, bytes_per_token=64, block_size=2)
        >>> with index.reserve(index.keys(a, weights="step-1")) as new:
        ...     print(new.start, new.stop, new.rows.tolist())  # write KV of these tokens to these rows
        0 4 [0, 1, 2, 3]
        >>> with index.hold(index.keys(b, weights="step-1")) as hit:
        ...     print(hit.tokens, hit.rows.tolist())
        4 [0, 1, 2, 3]
        >>> index.lookup(index.keys(b, weights="step-2")).tokens
        0
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        bytes_per_token: int,
        block_size: int = 16,
        features: FeatureStore | None = None,
    ):
        check_whole("PrefixIndex", "max_bytes", max_bytes)
        check_whole("PrefixIndex", "bytes_per_token", bytes_per_token)
        check_whole("PrefixIndex", "block_size", block_size)
        self.max_bytes, self.bytes_per_token = int(max_bytes), int(bytes_per_token)
        self.block_size, self.features = int(block_size), features
        self.capacity = self.max_bytes // (self.bytes_per_token * self.block_size)
        if not self.capacity:
            raise ArgumentError(
                f"PrefixIndex: max_bytes is {max_bytes}, but one block takes {bytes_per_token * block_size}. "
                "Fix: pass a larger budget, or smaller blocks"
            )
        self.stats = PrefixStats()
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        self._lock = RLock()
        self._life = object()  # what was held before has another
        self._blocks: dict[bytes, _Block] = {}
        # those that nobody holds, the next to be dropped first; a block comes after those that follow it
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free: list[int] = []
        self._unused = 0  # numbers from here on were never given
        self._open = 0  # holds and reservations
        self.stats.held = self.stats.bytes = 0

    def __reduce__(self) -> Any:
        return _empty, (self.max_bytes, self.bytes_per_token, self.block_size)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self)} of {self.capacity} blocks of {self.block_size} tokens)"

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_rows(self) -> int:
        """Rows that the KV store must have."""
        return self.capacity * self.block_size

    def keys(self, sample: Sample, *, weights: str, **about: Any) -> PrefixKeys:
        """Return `prefix_keys` of blocks of this size, with its keywords."""
        return prefix_keys(sample, self.block_size, weights=weights, **about)

    def lookup(self, keys: PrefixKeys, limit: int | None = None) -> Hit:
        """The longest cached prefix, of whole blocks and at most `limit` tokens. Counts as a use, and holds nothing."""
        count = self._limit("lookup", keys, limit)
        with self._lock:
            found = self._found(keys, count)
            for key in reversed(found):
                if key in self._idle:
                    self._idle.move_to_end(key)
            return self._hit(keys, found)

    @contextmanager
    def hold(self, keys: PrefixKeys, limit: int | None = None) -> Iterator[Hit]:
        """`lookup`, whose blocks stay where they are until the `with` ends."""
        count = self._limit("hold", keys, limit)
        with self._lock:
            life, found = self._life, self._found(keys, count)
            self._take(found)
            hit = self._hit(keys, found)
        try:
            yield hit
        finally:
            with self._lock:
                if life is self._life:
                    self._release(found)

    @contextmanager
    def reserve(
        self,
        keys: PrefixKeys,
        limit: int | None = None,
        *,
        packed_rows: np.ndarray | None = None,
        pack: Hashable = None,
    ) -> Iterator[Reservation]:
        """Room for the blocks that are not cached yet, as many as fit. Write their KV within the `with`.

        They are found once it ends; after an exception in it, never. Others that wrote the same blocks meanwhile win,
        and these rows are given back.

        Args: `packed_rows`: int [L], the packed row of each token of the sample in the pack named `pack`.
        Raises: ArgumentError for rows of another length or another type, and below 0.
        """
        count = self._limit("reserve", keys, limit)
        ranges = self._ranges(keys, count, packed_rows, pack)
        with self._lock:
            life, found = self._life, self._found(keys, count)
            self._take(found)
            wanted = keys.blocks[len(found) : count]
            numbers = self._numbers(len(wanted))
            self.stats.left_out += len(wanted) - len(numbers)
            first = len(found) * self.block_size
            stop = first + len(numbers) * self.block_size
        try:
            yield Reservation(first, stop, self._rows(numbers))
        except BaseException:
            with self._lock:
                if life is self._life:
                    self._free += reversed(numbers)
                    self._release(found)
            raise
        with self._lock:
            if life is not self._life:
                return
            added = []
            for i, number in enumerate(numbers, len(found)):
                key = keys.blocks[i]
                if key in self._blocks:  # another was faster
                    self._free.append(number)
                    self._idle.pop(key, None)
                else:
                    self._blocks[key] = _Block(number, packed=ranges[i] if ranges else ())
                    self.stats.added += 1
                self._blocks[key].refs += 1
                added.append(key)
            self._count()
            self._release([*found, *added])

    def features_of(self, hit: Hit, tower: Any) -> list[Any]:
        """Features of each medium of the prefix, as `FeatureStore.find` returns them: None where it has none.

        Raises: ArgumentError for an index without a feature store, and for what is no hit.
        """
        if not isinstance(hit, Hit):
            raise ArgumentError(
                f"PrefixIndex.features_of: hit is {kind_of(hit)}. Fix: pass what hold or lookup returns"
            )
        if self.features is None:
            raise ArgumentError(
                "PrefixIndex: it has no feature store. Fix: make it by PrefixIndex(…, features=the step's FeatureStore)"
            )
        return self.features.find(tower, hit.media)

    def clear(self) -> None:
        """Forget all blocks: after weights changed none is found any more, and they would be dropped one by one.

        Raises: ArgumentError while any are held or being written.
        """
        with self._lock:
            if self._open:
                raise ArgumentError(
                    f"PrefixIndex.clear: {self._open} prefixes are still held or being written. "
                    "Fix: clear once they are released"
                )
            lock = self._lock
            self._begin()
            self._lock = lock  # others may wait for it

    def _limit(self, what: str, keys: PrefixKeys, limit: int | None) -> int:
        """Return how many blocks may be read."""
        if not isinstance(keys, PrefixKeys):
            raise ArgumentError(
                f"PrefixIndex.{what}: keys is {kind_of(keys)}, expected PrefixKeys. Fix: pass index.keys(sample, …)"
            )
        if keys.block_size != self.block_size:
            raise ArgumentError(
                f"PrefixIndex.{what}: keys are for blocks of {keys.block_size} tokens, but the index has "
                f"{self.block_size}. "
                "Fix: pass index.keys(sample, …)"
            )
        if limit is None:
            return len(keys)
        check_whole(f"PrefixIndex.{what}", "limit", limit, least=0)
        return min(len(keys), int(limit) // self.block_size)

    def _found(self, keys: PrefixKeys, count: int) -> list[bytes]:
        found = []
        for key in keys.blocks[:count]:
            if key not in self._blocks:
                break
            found.append(key)
        return found

    def _hit(self, keys: PrefixKeys, found: Sequence[bytes]) -> Hit:
        blocks = [self._blocks[key] for key in found]
        tokens = len(found) * self.block_size
        self.stats.asked_tokens += keys.num_tokens
        self.stats.hit_tokens += tokens
        names = [name for start, _, name in keys.media if start < tokens]
        packed = _joined([r for block in blocks for r in block.packed])
        rows = self._rows([b.number for b in blocks])
        return Hit(tokens, rows, packed, tuple(dict.fromkeys(names)))

    def _rows(self, numbers: Sequence[int]) -> np.ndarray:
        first = np.asarray(numbers, dtype=np.int64)[:, None] * self.block_size
        return (first + np.arange(self.block_size)).reshape(-1)

    def _take(self, found: Sequence[bytes]) -> None:
        self._open += 1
        for key in found:
            self._blocks[key].refs += 1
            self._idle.pop(key, None)

    def _release(self, found: Sequence[bytes]) -> None:
        self._open -= 1
        for key in reversed(found):  # the last block is dropped before those it follows
            block = self._blocks[key]
            block.refs -= 1
            if not block.refs:
                self._idle[key] = None

    def _numbers(self, count: int) -> list[int]:
        """Numbers of `count` blocks, or of as many as there is room for."""
        out: list[int] = []
        while len(out) < count:
            if self._free:
                out.append(self._free.pop())
            elif self._unused < self.capacity:
                out.append(self._unused)
                self._unused += 1
            elif self._idle:
                oldest, _ = self._idle.popitem(last=False)
                out.append(self._blocks.pop(oldest).number)
                self.stats.evicted += 1
            else:
                break
        self._count()
        return out

    def _count(self) -> None:
        self.stats.held = len(self._blocks)
        self.stats.bytes = len(self._blocks) * self.block_size * self.bytes_per_token

    def _ranges(
        self, keys: PrefixKeys, count: int, rows: np.ndarray | None, pack: Hashable
    ) -> list[tuple[PackedRows, ...]]:
        """The packed rows of each block."""
        if rows is None:
            return []
        rows = whole_numbers("PrefixIndex.reserve", "packed_rows", rows)
        if rows.shape != (keys.num_tokens,) or (rows.size and rows.min() < 0):
            raise ArgumentError(
                f"PrefixIndex.reserve: packed_rows has shape {list(rows.shape)} or rows below 0, but the sample has "
                f"{keys.num_tokens} tokens. Fix: pass the row of each token"
            )
        blocks = rows[: count * self.block_size].reshape(count, self.block_size)
        return [_joined([(pack, int(r), int(r) + 1) for r in block]) for block in blocks]


def _joined(ranges: Sequence[PackedRows]) -> tuple[PackedRows, ...]:
    """Ranges that go on where the one before ended become one with it."""
    out: list[PackedRows] = []
    for pack, start, stop in ranges:
        if out and out[-1][0] == pack and out[-1][2] == start:
            out[-1] = (pack, out[-1][1], stop)
        else:
            out.append((pack, start, stop))
    return tuple(out)


def _empty(max_bytes: int, bytes_per_token: int, block_size: int) -> PrefixIndex:
    return PrefixIndex(max_bytes, bytes_per_token=bytes_per_token, block_size=block_size)


_alive: weakref.WeakSet[PrefixIndex] = weakref.WeakSet()


def _after_fork() -> None:
    """A child's indexes are empty; another thread of the parent may have held their locks."""
    for index in list(_alive):
        index._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
