"""Pixels by reference in Ray's object store: each medium once on the node that made the store, and fetched by Ray once
per other node that reads it.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mmpack.blobs.blob import check_key, checksum, parts_of
from mmpack.blobs.folder import BlobStats
from mmpack.errors import (
    ArgumentError,
    BackendError,
    BlobError,
    UnwrittenWarning,
    check_whole,
    needs,
    require,
)

with needs("ray", __name__):
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


# ---- the actor behind it ----------------------------------------------------------------------------

ASKED_FOR = 10.0  # seconds in which Ray has to say whether a holder lives; one that is slow does


class Found(NamedTuple):
    """Where a medium is: dtype's name, shape, checksum of key and bytes, and these bytes as an object."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int
    ref: Any


class Holder(NamedTuple):
    """A process. `token`: an object that it owns, in a list so that it travels as a reference; Ray loses it with the
    process, whatever ends it."""

    name: str
    token: list[Any]


@dataclass
class _Kept:
    """`found`: None, where it was damaged; it is held all the same, until it is put again."""

    found: Found | None = None
    nbytes: int = 0
    holders: Counter[str] = field(default_factory=Counter)


class Registry:
    """Cache keys, the objects under them, and who holds which; at most `max_bytes` of pixels."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the least recently used first
        self._tokens: dict[str, Any] = {}
        self._used = 0

    def put(
        self, key: str, dtype: str, shape: tuple[int, ...], crc32: int, body: Any, holder: Holder
    ) -> tuple[bool, Found | int]:
        """Keep and hold uint8 `body`. Whether it was written, and where it is; or how many bytes stand in its way."""
        there = self.hold([key], holder)
        if there:
            return False, there[key]
        self._evict(body.nbytes)
        if self._used + body.nbytes > self.max_bytes:
            self._forget_the_dead()  # asked only if there is no room
            self._evict(body.nbytes)
        if self._used + body.nbytes > self.max_bytes:
            return False, self._used
        found = Found(dtype, shape, crc32, ray.put(body))
        kept = self._kept.setdefault(key, _Kept())
        kept.found, kept.nbytes = found, body.nbytes
        self._used += body.nbytes
        self._hold(key, holder)
        return True, found

    def hold(self, keys: Iterable[str], holder: Holder) -> dict[str, Found]:
        """Where the media are that are here, each held once more for each time that it is named."""
        out = {}
        for key in keys:
            found = self._kept[key].found if key in self._kept else None
            if found is not None:
                self._hold(key, holder)
                out[key] = found
        return out

    def release(self, counts: Mapping[str, int], holder: str) -> None:
        for key, count in counts.items():
            if key in self._kept:
                held = self._kept[key].holders
                held[holder] -= count
                if held[holder] <= 0:
                    del held[holder]

    def find(self, key: str) -> Found | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key].found

    def discard(self, key: str, name: str) -> None:
        """Drop a medium that was read and is not as it was put; `name` is its object's, since another may be there."""
        kept = self._kept.get(key)
        if kept is not None and kept.found is not None and kept.found.ref.hex() == name:
            self._used -= kept.nbytes
            kept.found, kept.nbytes = None, 0

    def keys(self) -> list[str]:
        return [key for key, kept in self._kept.items() if kept.found is not None]

    def remove(self, keys: Iterable[str]) -> int:
        """Those that no process holds; how many."""
        there = [key for key in keys if key in self._kept]
        if any(self._kept[key].holders for key in there):
            self._forget_the_dead()
        gone = [key for key in there if not self._kept[key].holders]
        for key in gone:
            self._drop(key)
        return len(gone)

    def _hold(self, key: str, holder: Holder) -> None:
        self._tokens[holder.name] = holder.token[0]
        self._kept[key].holders[holder.name] += 1
        self._kept.move_to_end(key)

    def _drop(self, key: str) -> None:
        self._used -= self._kept.pop(key).nbytes

    def _evict(self, size: int) -> None:
        """Drop what nobody holds until `size` bytes fit."""
        for key in [key for key, kept in self._kept.items() if not kept.holders]:
            if self._used + size <= self.max_bytes:
                return
            self._drop(key)

    def _forget_the_dead(self) -> None:
        for name in [name for name, token in self._tokens.items() if not _lives(token)]:
            del self._tokens[name]
            for kept in self._kept.values():
                kept.holders.pop(name, None)


def _lives(token: Any) -> bool:
    """Whether the process that owns `token` does."""
    try:
        ray.get(token, timeout=ASKED_FOR)
    except GetTimeoutError:
        return True
    except RayError:  # that its owner died, or the object went with it
        return False
    return True


_tokens: dict[str, Holder] = {}  # of this process, by its id as Ray's worker


class RayBlobs(Mapping[str, Any]):
    """cache key -> pixels [patches, patch_dim], as Ray objects; what `mp.pack(samples, media=…)` reads.

    An actor on this node owns them. The object can be sent to Ray's tasks and actors, on any node. Reading copies
    nothing on a node that has the medium: arrays are read-only and lie over Ray's store (of bfloat16 a tensor, which
    is a copy).

    Args:
        max_bytes: of all media. Where a put does not fit, media that no process holds go, the least recently used
            first. What is being read stays until its arrays are gone.
        source: cache key -> pixels, for keys that are not here: such as a folder on a disk that nodes share. What it
            gives is kept here. It goes along to other processes; those that miss a key at the same time each ask.

    `put` and `keep` hold media for their process until `release` or its end, whatever ends it. The store ends with the
    process that made it, or when all objects of it are closed or gone; nothing is left in Ray's store then. Raises:
    BackendError where Ray is not started; ArgumentError, also where this node's store has less room than `max_bytes`.
    """

    def __init__(self, max_bytes: int, source: Mapping[str, Any] | None = None):
        check_whole("RayBlobs", "max_bytes", max_bytes)
        if not (source is None or hasattr(source, "get")):
            raise ArgumentError(
                f"RayBlobs: source is {type(source).__name__}, expected pixels by cache key. "
                "Fix: pass a mapping of cache keys to pixels"
            )
        if not ray.is_initialized():
            raise BackendError("RayBlobs: Ray is not started in this process. Fix: call ray.init()")
        node = ray.get_runtime_context().get_node_id()
        _check_room(node, max_bytes)
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here}
        self._use(ray.remote(**options)(Registry).remote(max_bytes), max_bytes, source)

    def _use(self, registry: Any, max_bytes: int, source: Mapping[str, Any] | None) -> None:
        self._registry, self.max_bytes, self.source = registry, max_bytes, source
        self.stats = BlobStats()
        self._guard = threading.Lock()
        self._here: dict[str, Found] = {}  # of what is held: reading it asks nobody
        self._holds: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # of these, what `release()` gives back

    # writing

    def put(self, key: str, pixels: Any) -> bool:
        """Keep pixels [patches, patch_dim] (array or tensor) under a cache key, and hold it. False: it was there.

        Raises: BlobError (MM503) where they don't fit into the budget with what is held; BlobError (MM404) where
        the store has ended; ArgumentError for no cache key, and for pixels of another type or shape than those there.
        """
        check_key(key, "RayBlobs")
        dtype, shape, body = parts_of(key, pixels)
        holder = _holder()
        wrote, found = False, self._ask("hold", [key], holder).get(key)
        if found is None:
            wrote, found = self._ask("put", key, dtype, shape, checksum(key, body), body, holder)
        if not isinstance(found, Found):
            raise BlobError(
                f"RayBlobs: {body.nbytes} bytes don't fit: {found} of {self.max_bytes} are in use, all held by "
                "a process (MM503). Fix: call release() on what was handed over, or raise max_bytes",
                "MM503",
            )
        if (found.dtype, tuple(found.shape)) != (dtype, tuple(shape)):
            self._ask("release", {key: 1}, holder.name)
            raise ArgumentError(
                f"RayBlobs: {key:.16}… is {found.dtype} {list(found.shape)} in the store, but {dtype} "
                f"{list(shape)} now. "
                "Fix: make all samples by one wrap_processor(…, pixels=…)"
            )
        self._note({key: found}, [key])
        self._held[key] += 1
        self.stats.written += wrote
        self.stats.bytes_written += wrote * body.nbytes
        self.stats.known += not wrote
        return bool(wrote)

    # holding

    @contextmanager
    def hold(self, keys: Iterable[str]) -> Iterator[None]:
        """In the block these media stay. Raises: BlobError (MM404): one is gone."""
        keys = list(keys)
        self._share(keys)
        try:
            yield
        finally:
            self._unshare(keys)

    def keep(self, keys: Iterable[str]) -> None:
        """Hold media for this process, as `put` does. Raises: BlobError (MM404): one is gone."""
        keys = list(keys)
        self._share(keys)
        self._held.update(keys)

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Let go of what `put` and `keep` hold for this process, once for each time that a key is named; None: of all
        of it. Media stay until room is needed."""
        named = list(self._held.elements()) if keys is None else list(keys)
        given_back = list((Counter(named) & self._held).elements())
        self._held -= Counter(given_back)
        self._unshare(given_back)

    def _share(self, keys: list[str]) -> None:
        for key in keys:
            check_key(key, "RayBlobs")
        found = self._ask("hold", keys, _holder())
        there = [key for key in keys if key in found]
        self._note(found, there)
        gone = [key for key in keys if key not in found]
        if gone:
            self._unshare(there)
            raise BlobError(
                f"RayBlobs: {gone[0]:.16}… is not in the store (MM404). "
                "Fix: keep hold of it where it is made until it is held here, or raise max_bytes",
                "MM404",
            )

    def _note(self, found: dict[str, Found], keys: list[str]) -> None:
        with self._guard:
            self._here.update(found)
            self._holds.update(keys)

    def _unshare(self, keys: list[str]) -> None:
        if not keys:
            return
        with self._guard:
            self._holds -= Counter(keys)
            for key in set(keys) - set(self._holds):
                self._here.pop(key, None)
        self._ask("release", dict(Counter(keys)), _holder().name)

    # reading

    def __getitem__(self, key: str) -> Any:
        """The pixels of a key. Raises: KeyError; BlobError for damaged pixels (MM502), and where the store has ended
        (MM404)."""
        check_key(key, "RayBlobs")
        found = self._here.get(key) or self._ask("find", key)
        if found is None:
            return self._fetched(key)
        body = _got(found.ref)
        if checksum(key, body) != found.crc32:
            self._discard(key, found)
            if self.source is None:
                raise BlobError(
                    f"RayBlobs: {key:.16}… is damaged: not as it was put (MM502). Fix: put the medium again",
                    "MM502",
                )
            return self._fetched(key)
        self.stats.read += 1
        self.stats.bytes_read += body.nbytes
        if found.dtype == "bfloat16":
            torch = require("torch", "torch", "RayBlobs: bfloat16 pixels")
            return torch.from_numpy(body.copy()).view(torch.bfloat16).reshape(found.shape)
        return body.view(found.dtype).reshape(found.shape)

    def _discard(self, key: str, found: Found) -> None:
        """So that it can be put again; its holds stay."""
        with self._guard:
            if self._here.get(key) is found:
                del self._here[key]
        self._ask("discard", key, found.ref.hex())

    def _fetched(self, key: str) -> Any:
        """The blob of `source`, kept here."""
        pixels = None if self.source is None else self.source.get(key)
        if pixels is None:
            raise KeyError(key)
        self.stats.fetched += 1
        try:
            self.put(key, pixels)
        except BlobError as error:
            if error.code != "MM503":
                raise
            self.stats.unwritten += 1
            if self.stats.unwritten == 1:
                said = f"{error}; until then each read fetches for itself"
                warnings.warn(said, UnwrittenWarning, stacklevel=3)
            return pixels
        try:
            return self[key]
        finally:
            self.release([key])

    def __contains__(self, key: object) -> bool:
        """Whether it is here, or `source` has it."""
        if not isinstance(key, str):
            return False
        here = key in self._here or self._ask("find", key) is not None
        return here or (self.source is not None and key in self.source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ask("keys"))

    def __len__(self) -> int:
        return len(self._ask("keys"))

    def remove(self, keys: Iterable[str]) -> int:
        """Remove those that no process holds; how many. Arrays over them stay whole."""
        return int(self._ask("remove", list(keys)))

    def close(self) -> None:
        """Let go of everything and use it no more; arrays stay whole."""
        if self._registry is None:
            return
        with suppress(BlobError):  # it may have ended, and then so have all holds
            self._unshare(list(self._holds.elements()))
        self._held.clear()
        self._registry = None

    def __enter__(self) -> RayBlobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """The same store; what this process holds stays its own."""
        return _opened, (self._registry, self.max_bytes, self.source)

    def __repr__(self) -> str:
        return f"RayBlobs(max_bytes={self.max_bytes})"

    def _ask(self, method: str, *args: Any) -> Any:
        if self._registry is None:
            raise BlobError(
                "RayBlobs: the store was closed (MM404). Fix: use it before close()", "MM404"
            )
        return _got(getattr(self._registry, method).remote(*args))


def _opened(registry: Any, max_bytes: int, source: Mapping[str, Any] | None) -> RayBlobs:
    store = RayBlobs.__new__(RayBlobs)
    store._use(registry, max_bytes, source)
    return store


def _holder() -> Holder:
    """This process, as the registry knows it."""
    name = ray.get_runtime_context().get_worker_id()
    if name not in _tokens:
        _tokens[name] = Holder(name, [ray.put(np.zeros(1, np.uint8))])
    return _tokens[name]


def _got(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        raise BlobError(
            f"RayBlobs: the store can't be reached ({type(error).__name__}) (MM404). "
            "Fix: keep the process that made it alive until all readers are done",
            "MM404",
        ) from error


def _check_room(node: str, max_bytes: int) -> None:
    [own] = [n for n in ray.nodes() if n["NodeID"] == node]
    room = int(own["Resources"].get("object_store_memory", 0))
    if room < max_bytes:
        raise ArgumentError(
            f"RayBlobs: this node's object store has {room} bytes, max_bytes is {max_bytes}. "
            "Fix: pass a smaller max_bytes, or ray.init(object_store_memory=…)"
        )
