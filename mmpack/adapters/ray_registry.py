"""The actor behind a RayBlobs. It owns the objects: Ray frees one when the registry and its readers have let go of it,
and all of them when the registry ends. Methods answer with plain values, since Ray hands errors on with a traceback.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmpack.errors import needs

with needs("ray", __name__):
    import ray
    from ray.exceptions import GetTimeoutError, RayError

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

    def known(self, key: str, holder: Holder) -> Found | None:
        """A medium that is here; it is held from now on."""
        return self.hold([key], holder).get(key)

    def put(
        self, key: str, dtype: str, shape: tuple[int, ...], crc32: int, body: Any, holder: Holder
    ) -> tuple[bool, Found | int]:
        """Keep and hold uint8 `body`. Whether it was written, and where it is; or how many bytes stand in its way."""
        there = self.known(key, holder)
        if there is not None:
            return False, there
        self._make_room(body.nbytes)
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
        """Of a medium that was read and is not as it was put; `name` is its object's, since another may be there."""
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

    def _make_room(self, size: int) -> None:
        """Drop what nobody holds until `size` bytes fit; whether holders live is asked only if that is not enough."""
        self._evict(size)
        if self._used + size > self.max_bytes:
            self._forget_the_dead()
            self._evict(size)

    def _evict(self, size: int) -> None:
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
