"""Specs: each states once what a field of a record accepts; it reads, writes and describes the field.

A spec never trusts its input: it allocates no more than what it was given, and its error names
file, record and field (`where`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mmpack.errors import TraceError
from mmpack.schema.error_text import shown, trace_error
from mmpack.schema.plain_json import check_json

INT_MAX = 2**53 - 1  # what JSON carries exactly
COUNT_MAX = 2**31 - 1


class Spec:
    """Base: `read` turns JSON into the value, `write` turns it back, `schema` describes it.

    `holds`: whether a value is as `read` returns it. `checked`: what `read` returns for a value in memory.
    `arrow_type`: of a Parquet column of such values.
    """

    def read(self, value: Any, where: str) -> Any:
        raise TypeError(f"{type(self).__name__} has no read")

    def holds(self, value: Any) -> bool:
        return False

    def checked(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        """The value as `read` returns it; with a fault, which joins `faults`, the value as it is."""
        try:
            return self.read(value, where)
        except TraceError as error:
            faults.append(error)
        except Exception as error:  # of a foreign object, which may raise anything
            why = f"a value of type {type(value).__name__} that raises {type(error).__name__}"
            faults.append(trace_error(where, f"is {why}"))
        return value

    def write(self, value: Any, numpy: bool) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        """The type of a column of such values; None for what Parquet holds as JSON text."""
        return None


@dataclass(frozen=True)
class Int(Spec):
    low: int = 0
    high: int = COUNT_MAX

    def read(self, value: Any, where: str) -> int:
        if self.holds(value):  # most are
            return int(value)
        if isinstance(value, np.integer):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise trace_error(where, f"expected an integer, found {shown(value)}")
        if not self.low <= value <= self.high:
            raise trace_error(where, f"{shown(value)} is outside [{self.low}, {self.high}]")
        return value

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        return pyarrow.int64()


@dataclass(frozen=True)
class Float(Spec):
    def read(self, value: Any, where: str) -> float:
        if isinstance(value, (np.floating, np.integer)):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise trace_error(where, f"expected a number, found {shown(value)}")
        if isinstance(value, int) and abs(value) > INT_MAX:
            raise trace_error(where, f"{shown(value)} is too large for a number")
        if not math.isfinite(value):
            raise trace_error(where, f"{value} is not a finite number", "MM009")
        return float(value)

    def holds(self, value: Any) -> bool:
        return type(value) is float and math.isfinite(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number"}


@dataclass(frozen=True)
class Str(Spec):
    choices: Collection[str] = ()
    pattern: str = ""
    code: str = "MM003"  # of the rule that another string breaks

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise trace_error(where, f"expected a string, found {shown(value)}")
        if self.choices and value not in self.choices:
            raise trace_error(
                where, f"{shown(value)} is none of {', '.join(self.choices)}", self.code
            )
        if self.pattern and not re.search(self.pattern, value):
            raise trace_error(where, f"{shown(value)} does not match {self.pattern}")
        return value

    def holds(self, value: Any) -> bool:
        return (
            type(value) is str
            and (not self.choices or value in self.choices)
            and (not self.pattern or re.search(self.pattern, value) is not None)
        )

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "string"}
        if self.choices:
            out["enum"] = list(self.choices)
        if self.pattern:
            out["pattern"] = self.pattern
        return out

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        return pyarrow.string()


@dataclass(frozen=True)
class Numbers(Spec):
    """A tuple of numbers, each as `item` says, of a fixed length if `length` is given; see `Ints` and `Floats`."""

    item: Int | Float
    length: int | None = None

    def read(self, value: Any, where: str) -> tuple[Any, ...]:
        array = isinstance(value, np.ndarray) and value.ndim > 0
        if not array and not isinstance(value, (list, tuple)):
            raise trace_error(where, f"expected an array, found {shown(value)}")
        if self.length is not None and len(value) != self.length:
            raise trace_error(where, f"expected {self.length} values, found {len(value)}", "MM008")
        if all(map(self.item.holds, value)):
            return tuple(value)
        return tuple(self.item.read(v, f"{where}[{i}]") for i, v in enumerate(value))

    def write(self, value: Any, numpy: bool) -> Any:
        """Plain numbers; any other value stays as it is, and `read` refuses it."""
        if not isinstance(value, (list, tuple, np.ndarray)):
            return value
        kind: Any = int if isinstance(self.item, Int) else float
        kinds = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        return [kind(v) if isinstance(v, kinds) and not isinstance(v, bool) else v for v in value]

    def holds(self, value: Any) -> bool:
        fits = type(value) is tuple and self.length in (None, len(value))
        return fits and all(map(self.item.holds, value))

    def schema(self) -> dict[str, Any]:
        bounds = {} if self.length is None else {"minItems": self.length, "maxItems": self.length}
        return {"type": "array", "items": self.item.schema()} | bounds

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        item = self.item.arrow_type(pyarrow)
        return None if item is None else pyarrow.list_(item)


def Ints(length: int | None = None) -> Numbers:
    """Whole numbers from 0 to COUNT_MAX."""
    return Numbers(Int(), length)


def Floats(length: int | None = None) -> Numbers:
    """Finite numbers."""
    return Numbers(Float(), length)


@dataclass(frozen=True)
class Array(Spec):
    """A numpy array of `dtype`: [n], or [rows, n] if `rows` is given (0: any number of rows).

    `exact`: in memory, only an array of this dtype will do; else what `read` accepts.
    """

    dtype: str
    rows: int | None = None
    low: int | None = 0
    high: int | None = INT_MAX
    exact: bool = True

    def read(self, value: Any, where: str) -> np.ndarray:
        array = value if isinstance(value, np.ndarray) else self._from_list(value, where)
        self._check(array, where)
        return np.ascontiguousarray(array, dtype=self.dtype)

    def checked(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        """Without a copy, if `exact`: what uses an array of another dtype would copy or misread it."""
        if not self.exact:
            return super().checked(value, where, faults)
        if not isinstance(value, np.ndarray) or value.dtype != self.dtype:
            found = getattr(value, "dtype", None)
            found = found if isinstance(found, np.dtype) else type(value).__name__
            made = f"np.asarray({where.rpartition('.')[2]}, np.{self.dtype})"
            faults.append(
                trace_error(where, f"is {found}, expected a numpy array such as {made} makes")
            )
            return value
        array = np.asarray(value)  # without its subclass
        try:
            self._check(array, where)
        except TraceError as error:
            faults.append(error)
        return array

    def _check(self, array: np.ndarray, where: str) -> None:
        if array.ndim != (1 if self.rows is None else 2):
            raise trace_error(
                where, f"expected {self._shape()}, found shape {list(array.shape)}", "MM008"
            )
        if self.rows and array.shape[0] != self.rows:
            raise trace_error(where, f"expected {self.rows} rows, found {array.shape[0]}", "MM008")
        self._check_values(array, where)

    def _check_values(self, array: np.ndarray, where: str) -> None:
        if array.size == 0:
            return
        flat = array.reshape(-1)
        if self.dtype.startswith("int"):
            if flat.dtype.kind not in "iu":
                raise trace_error(where, f"expected integers, found values of type {flat.dtype}")
            if self.low is not None and flat.min() < self.low:
                at = int(flat.argmin())
            elif self.high is not None and flat.max() > self.high:
                at = int(flat.argmax())
            else:
                return
            bounds = (
                f"above {self.high}" if self.low is None else f"outside [{self.low}, {self.high}]"
            )
            raise trace_error(f"{where}[{at}]", f"{flat[at]} is {bounds}")
        if flat.dtype.kind not in "iuf":
            raise trace_error(where, f"expected numbers, found values of type {flat.dtype}")
        finite = np.isfinite(flat)
        if not finite.all():
            at = int(finite.argmin())
            raise trace_error(f"{where}[{at}]", f"{flat[at]} is not a finite number", "MM009")
        if np.finfo(self.dtype).max < max(flat.max(), -flat.min()):
            raise trace_error(where, f"holds a number too large for {self.dtype}")

    def _from_list(self, value: Any, where: str) -> np.ndarray:
        if not isinstance(value, (list, tuple)):
            raise trace_error(where, f"expected {self._shape()}, found {shown(value)}")
        rows = [value] if self.rows is None else value
        for i, row in enumerate(rows):
            at = where if self.rows is None else f"{where}[{i}]"
            if not isinstance(row, (list, tuple, np.ndarray)):
                raise trace_error(at, f"expected an array, found {shown(row)}")
            if isinstance(row, np.ndarray) and (row.ndim != 1 or row.dtype.kind not in "iuf"):
                why = f"values of type {row.dtype} and shape {list(row.shape)}"
                raise trace_error(at, f"expected numbers [n], found {why}")
            if len(row) != len(rows[0]):
                raise trace_error(at, f"has {len(row)} values, row 0 has {len(rows[0])}", "MM008")
            if not isinstance(row, np.ndarray):
                wanted = {int} if self.dtype.startswith("int") else {int, float}
                if not set(map(type, row)) <= wanted:
                    kind = "an integer" if wanted == {int} else "a number"
                    j, odd = next((j, v) for j, v in enumerate(row) if type(v) not in wanted)
                    raise trace_error(f"{at}[{j}]", f"expected {kind}, found {shown(odd)}")
        try:
            array = np.asarray(value, dtype="int64" if self.dtype.startswith("int") else "float64")
        except OverflowError:
            raise trace_error(where, "holds an integer beyond 64 bits") from None
        return array.reshape(0, 0) if self.rows is not None and not rows else array

    def _shape(self) -> str:
        return "an array [n]" if self.rows is None else f"an array [{self.rows or 'rows'}, n]"

    def write(self, value: Any, numpy: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return value
        return np.asarray(value) if numpy else np.asarray(value).tolist()

    def schema(self) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "integer" if self.dtype.startswith("int") else "number"}
        if item["type"] == "integer":
            if self.low is not None:
                item["minimum"] = self.low
            if self.high is not None:
                item["maximum"] = self.high
        row = {"type": "array", "items": item}
        if self.rows is None:
            return row
        return {"type": "array", "items": row} | (
            {"minItems": self.rows, "maxItems": self.rows} if self.rows else {}
        )

    def arrow_type(self, pyarrow: ModuleType) -> Any:
        row = pyarrow.list_(pyarrow.type_for_alias(self.dtype))
        return row if self.rows is None else pyarrow.list_(row)


@dataclass(frozen=True)
class Json(Spec):
    """A free object: any JSON, of bounded depth, numbers finite."""

    def read(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise trace_error(where, f"expected an object, found {shown(value)}")
        check_json(value, where)
        return value

    def write(self, value: Any, numpy: bool) -> Any:
        """Objects in its dicts that have a `to_json` become what that returns; without one, `value` itself."""
        if hasattr(value, "to_json"):
            return value.to_json()
        if not isinstance(value, dict):
            return value
        made = {k: self.write(v, numpy) for k, v in value.items()}
        return value if all(made[k] is v for k, v in value.items()) else made

    def holds(self, value: Any) -> bool:
        # in memory it may hold anything; `write_trace` refuses what JSON can't carry
        return isinstance(value, dict)

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}
