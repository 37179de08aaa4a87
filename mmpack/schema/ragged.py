"""Ragged lists, one per loss token: n lists of m ids in all, with a logprob each where somebody scored them.

List k is `ids[offsets[k]:offsets[k + 1]]`, in ascending order, each id once: equal lists are equal arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.specs import COUNT_MAX, Array, Spec

DTYPES = {"offsets": "int64", "ids": "int32", "logprobs": "float32"}
Fault = tuple[str, str, str]  # part, why, code


@dataclass(frozen=True, eq=False)
class Ragged:
    """n lists of ids; the order of ids within a list says nothing, and is ascending.

    Raises: ArgumentError for arrays of another dtype or shape, offsets that do not fit the ids, ids below 0, logprobs
    that are not finite. That ids ascend is a rule (MM334), which `Ragged.of` keeps.

    Example:
        >>> from mmpack.schema.ragged import Ragged
        >>> kept = Ragged.of([[7, 3], [5]])
        >>> kept
        Ragged(lists=2, ids=3)
        >>> kept.offsets.tolist(), kept.ids.tolist(), kept[1:].ids.tolist()
        ([0, 2, 3], [3, 7, 5], [5])
    """

    offsets: np.ndarray  # int64 [n+1], from 0 to m
    ids: np.ndarray  # int32 [m]
    logprobs: np.ndarray | None = None  # float32 [m], natural log

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            array = getattr(self, name)
            if array is None and name == "logprobs":
                continue
            right = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
            if not right:
                known = isinstance(array, np.ndarray)
                what = f"{array.dtype} {list(array.shape)}" if known else kind_of(array)
                raise ArgumentError(
                    f"Ragged: {name} is {what}, expected a numpy array of {dtype} [n]. "
                    "Fix: make one of lists by Ragged.of(lists, logprobs)"
                )
        if fault := ragged_fault(self.offsets, self.ids, self.logprobs):
            part, why, _ = fault
            raise ArgumentError(f"Ragged: {part} {why}. Fix: call Ragged.of(lists, logprobs)")

    @classmethod
    def of(cls, lists: Iterable[Any], logprobs: Iterable[Any] | None = None) -> Ragged:
        """From a list of ids per loss token, and logprobs of the same lengths; each list is sorted by id.

        Raises: ArgumentError for what is no such list, an id twice in one list, and unlike lengths.
        """
        rows = [_row("ids", k, row, "iu") for k, row in enumerate(_listed("lists", lists))]
        scores = None
        if logprobs is not None:
            given = enumerate(_listed("logprobs", logprobs))
            scores = [_row("logprobs", k, row, "fiu") for k, row in given]
            lengths = [len(row) for row in rows], [len(row) for row in scores]
            if lengths[0] != lengths[1]:
                raise ArgumentError(
                    "Ragged.of: ids and logprobs have lists of different lengths. Fix: pass one logprob per id"
                )
        order = [np.argsort(row, kind="stable") for row in rows]
        rows = [row[at] for row, at in zip(rows, order, strict=True)]
        for k, row in enumerate(rows):
            if len(row) and (row[0] < 0 or row[-1] > COUNT_MAX):
                raise ArgumentError(
                    f"Ragged.of: list {k} holds an id outside [0, {COUNT_MAX}]. Fix: pass token ids"
                )
            if (row[1:] == row[:-1]).any():
                at = int(np.argmax(row[1:] == row[:-1]))
                raise ArgumentError(
                    f"Ragged.of: list {k} holds id {row[at]} twice. Fix: pass each id once"
                )
        values = None
        if scores is not None:
            scores = [row[at] for row, at in zip(scores, order, strict=True)]
            values = np.concatenate([np.zeros(0), *scores]).astype(np.float32)
        ids = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int32)
        return cls(np.cumsum([0, *map(len, rows)], dtype=np.int64), ids, values)

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The lists of all `parts`, one after the other. Logprobs: of all parts, or of none.

        Raises: ArgumentError where only some have logprobs.
        """
        parts = list(parts)
        scored = [part.logprobs is not None for part in parts]
        if any(scored) and not all(scored):
            raise ArgumentError(
                "Ragged.cat: only some parts have logprobs. Fix: pass parts that all have them, or none"
            )
        lengths = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in parts)])
        ids = np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)])
        logprobs = None
        if any(scored):
            logprobs = np.concatenate([p.logprobs for p in parts if p.logprobs is not None])
        return cls(np.cumsum(lengths), ids, logprobs)

    @classmethod
    def empty(cls, count: int, scored: bool = False) -> Ragged:
        """`count` lists without an id."""
        logprobs = np.zeros(0, np.float32) if scored else None
        return cls(np.zeros(count + 1, np.int64), np.zeros(0, np.int32), logprobs)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: ids of each list."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        extra = 0 if self.logprobs is None else self.logprobs.nbytes
        return int(self.offsets.nbytes + self.ids.nbytes + extra)

    def __len__(self) -> int:
        """n, the number of lists."""
        return len(self.offsets) - 1

    def __getitem__(self, which: slice | np.ndarray) -> Ragged:
        """The lists of a slice, of indices [k] or of a mask [n], in that order. Raises: ArgumentError."""
        try:
            rows = np.arange(len(self))[which]
        except (IndexError, TypeError, ValueError):
            raise ArgumentError(
                f"Ragged: {kind_of(which)} selects none of its {len(self)} lists. "
                "Fix: index it by a slice, indices or a mask"
            ) from None
        if np.ndim(rows) != 1:
            raise ArgumentError(
                "Ragged: an integer would select one list. Fix: index it by a slice, indices or a mask"
            )
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        flat = np.repeat(self.offsets[:-1][rows] - (ends - lengths), lengths)
        flat += np.arange(len(flat))
        logprobs = None if self.logprobs is None else self.logprobs[flat]
        return Ragged(np.concatenate([[0], ends]).astype(np.int64), self.ids[flat], logprobs)

    def spread(self, places: np.ndarray, count: int) -> Ragged:
        """`count` lists: those of `places` (int [n], ascending) are these, all others are empty."""
        lengths = np.zeros(count, np.int64)
        lengths[places] = self.lengths
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Ragged(offsets, self.ids, self.logprobs)

    def lists(self) -> list[np.ndarray]:
        """The ids of each list, as views."""
        return np.split(self.ids, self.offsets[1:-1]) if len(self) else []

    def __eq__(self, other: object) -> bool:
        if type(other) is not Ragged:
            return NotImplemented
        return (
            np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.ids, other.ids)
            and (self.logprobs is None) == (other.logprobs is None)
            and (self.logprobs is None or np.array_equal(self.logprobs, other.logprobs))  # type: ignore[arg-type]
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = "" if self.logprobs is None else ", with logprobs"
        return f"Ragged(lists={len(self)}, ids={len(self.ids)}{more})"


def ragged_fault(offsets: np.ndarray, ids: np.ndarray, logprobs: np.ndarray | None) -> Fault | None:
    """Return the first array that does not fit the others, and why; None if all fit."""
    if not len(offsets) or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        return "offsets", "do not go up from 0", "MM013"
    if offsets[-1] != len(ids):
        return "offsets", f"end at {offsets[-1]}, there are {len(ids)} ids", "MM013"
    if len(ids) and ids.min() < 0:
        at = int(ids.argmin())
        return f"ids[{at}]", f"is {ids[at]}, below 0", "MM003"
    if logprobs is not None and len(logprobs) != len(ids):
        return "logprobs", f"has {len(logprobs)} values for {len(ids)} ids", "MM008"
    if logprobs is not None and not np.isfinite(logprobs).all():
        at = int(np.isfinite(logprobs).argmin())
        return f"logprobs[{at}]", f"is {logprobs[at]}, not a finite number", "MM009"
    return None


@dataclass(frozen=True)
class RaggedSpec(Spec):
    """`{"offsets": […], "ids": […]}`, and `"logprobs": […]` if `scored`."""

    scored: bool = False

    def read(self, value: Any, where: str) -> Ragged:
        if isinstance(value, Ragged):
            value = {name: getattr(value, name) for name in self._parts(value)}
        if not isinstance(value, dict):
            why = (
                f"expected an object of lists, in memory an mp.schema.Ragged, found {shown(value)}"
            )
            raise trace_error(where, why)
        parts = ["offsets", "ids", *(["logprobs"] if self.scored else [])]
        if missing := [name for name in parts if value.get(name) is None]:
            raise trace_error(f"{where}.{missing[0]}", "is missing", "MM004")
        if more := [str(name) for name in value if name not in parts]:
            raise trace_error(f"{where}.{more[0]:.40}", f"is none of {', '.join(parts)}")
        read = [_PARTS[name].read(value[name], f"{where}.{name}") for name in parts]
        logprobs = read[2] if self.scored else None
        if fault := ragged_fault(read[0], read[1], logprobs):
            part, why, code = fault
            raise trace_error(f"{where}.{part}", why, code)
        return Ragged(*read)

    def _parts(self, value: Ragged) -> list[str]:
        return [name for name in DTYPES if getattr(value, name) is not None]

    def holds(self, value: Any) -> bool:
        if type(value) is not Ragged or (value.logprobs is not None) != self.scored:
            return False
        return ragged_fault(value.offsets, value.ids, value.logprobs) is None

    def write(self, value: Any, numpy: bool) -> Any:
        if not isinstance(value, Ragged):
            return value  # which `read` refuses
        out = {"offsets": value.offsets, "ids": value.ids}
        if value.logprobs is not None:
            # the shortest decimals that are these float32
            out["logprobs"] = value.logprobs.astype("U").astype(np.float64)
        return out if numpy else {name: array.tolist() for name, array in out.items()}

    def schema(self) -> dict[str, Any]:
        parts = ["offsets", "ids", *(["logprobs"] if self.scored else [])]
        return {
            "type": "object",
            "properties": {name: _PARTS[name].schema() for name in parts},
            "required": parts,
            "additionalProperties": False,
        }

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        """A list of lists: Parquet's levels are the offsets."""
        return pyarrow.list_(pyarrow.list_(pyarrow.int32()))


@dataclass(frozen=True)
class TeachersSpec(Spec):
    """`{teacher: {"offsets": […], "ids": […], "logprobs": […]}}`."""

    def read(self, value: Any, where: str) -> dict[str, Ragged]:
        if not isinstance(value, dict):
            why = f"expected an object of teachers, in memory {{name: mp.schema.Ragged}}, found {shown(value)}"
            raise trace_error(where, why)
        if odd := [name for name in value if not isinstance(name, str)]:
            raise trace_error(where, f"has the teacher {shown(odd[0])}, expected a name")
        return {
            name: _SCORED.read(lists, f"{where}[{name!r:.40}]") for name, lists in value.items()
        }

    def holds(self, value: Any) -> bool:
        return type(value) is dict and all(
            type(name) is str and _SCORED.holds(lists) for name, lists in value.items()
        )

    def write(self, value: Any, numpy: bool) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _SCORED.write(lists, numpy) for name, lists in value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": _SCORED.schema()}

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        lists = [
            ("name", pyarrow.string()),
            ("ids", _SCORED.arrow_type(pyarrow)),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
        ]
        return pyarrow.list_(pyarrow.struct(lists))


_PARTS = {
    "offsets": Array("int64"),
    "ids": Array("int32", high=COUNT_MAX),
    "logprobs": Array("float32", low=None),
}
_SCORED = RaggedSpec(scored=True)


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise ArgumentError(
            f"Ragged.of: {name} is {kind_of(given)}, expected a list per loss token. "
            "Fix: pass lists, such as [[3, 7], [5]]"
        )
    return list(given)


def _row(name: str, k: int, given: Any, kinds: str) -> np.ndarray:
    try:
        row = np.asarray(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        row = np.zeros((0, 0), object)
    if row.ndim != 1 or (row.size and row.dtype.kind not in kinds):
        what = "integers" if name == "ids" else "numbers"
        raise ArgumentError(
            f"Ragged.of: {name} of list {k} are {kind_of(given)}, expected {what} [k]. "
            "Fix: pass lists, such as [[3, 7], [5]]"
        )
    return row.astype(np.int64 if name == "ids" else np.float64)
