"""How a field of a record is declared: one spec reads it, writes it and describes it.

A spec never trusts its input: it allocates no more than what it was handed, and its error names
file, record and field (`where`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mmpack.errors import TraceError
from mmpack.schema.error_text import fail, named, shown
from mmpack.schema.plain_json import check_json

INT_MAX = 2**53 - 1  # what JSON carries exactly
COUNT_MAX = 2**31 - 1
UNSET: Any = object()


class Spec:
    """Base: `read` turns JSON into the value, `write` turns it back, `schema` describes it.

    `holds`: whether a value is as `read` gives it. `taken`: what `read` gives of a value in memory.
    """

    def read(self, value: Any, where: str) -> Any:
        raise TypeError(f"{type(self).__name__} has no read")

    def holds(self, value: Any) -> bool:
        return False

    def taken(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        """A value whose fault is noted is given back as it is."""
        try:
            return self.read(value, where)
        except TraceError as error:
            faults.append(error)
        except Exception as error:  # of an object of another's making, which may raise anything
            why = f"a value of type {type(value).__name__} that raises {type(error).__name__}"
            faults.append(fail(where, f"is {why}"))
        return value

    def write(self, value: Any, numpy: bool) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Int(Spec):
    low: int = 0
    high: int = COUNT_MAX

    def read(self, value: Any, where: str) -> int:
        if isinstance(value, np.integer):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(where, f"expected an integer, found {shown(value)}")
        if not self.low <= value <= self.high:
            raise fail(where, f"{shown(value)} is outside [{self.low}, {self.high}]")
        return value

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Float(Spec):
    def read(self, value: Any, where: str) -> float:
        if isinstance(value, (np.floating, np.integer)):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fail(where, f"expected a number, found {shown(value)}")
        if isinstance(value, int) and abs(value) > INT_MAX:
            raise fail(where, f"{shown(value)} is too large for a number")
        if not math.isfinite(value):
            raise fail(where, f"{value} is not a finite number", "MM009")
        return float(value)

    def holds(self, value: Any) -> bool:
        return type(value) is float and math.isfinite(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number"}


@dataclass(frozen=True)
class Str(Spec):
    choices: tuple[str, ...] = ()
    pattern: str = ""

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise fail(where, f"expected a string, found {shown(value)}")
        if self.choices and value not in self.choices:
            raise fail(where, f"{shown(value)} is none of {', '.join(self.choices)}")
        if self.pattern and not re.search(self.pattern, value):
            raise fail(where, f"{shown(value)} does not match {self.pattern}")
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


@dataclass(frozen=True)
class Ints(Spec):
    """A tuple of integers, of a fixed length if `length` is given."""

    length: int | None = None
    low: int = 0
    high: int = COUNT_MAX

    def read(self, value: Any, where: str) -> tuple[int, ...]:
        return _tuple(value, where, Int(self.low, self.high), self.length)

    def write(self, value: Any, numpy: bool) -> Any:
        return _written(value, int, (int, np.integer))

    def holds(self, value: Any) -> bool:
        if type(value) is not tuple or self.length not in (None, len(value)):
            return False
        return all(type(v) is int and self.low <= v <= self.high for v in value)

    def schema(self) -> dict[str, Any]:
        return _array_schema(Int(self.low, self.high), self.length)


@dataclass(frozen=True)
class Floats(Spec):
    """A tuple of finite numbers, of a fixed length if `length` is given."""

    length: int | None = None

    def read(self, value: Any, where: str) -> tuple[float, ...]:
        return _tuple(value, where, Float(), self.length)

    def write(self, value: Any, numpy: bool) -> Any:
        return _written(value, float, (int, float, np.integer, np.floating))

    def holds(self, value: Any) -> bool:
        if type(value) is not tuple or self.length not in (None, len(value)):
            return False
        return all(type(v) is float and math.isfinite(v) for v in value)

    def schema(self) -> dict[str, Any]:
        return _array_schema(Float(), self.length)


@dataclass(frozen=True)
class Array(Spec):
    """A numpy array of `dtype`: [n], or [rows, n] if `rows` is given (0: any number of rows)."""

    dtype: str
    rows: int | None = None
    low: int | None = 0
    high: int | None = INT_MAX

    def read(self, value: Any, where: str) -> np.ndarray:
        array = value if isinstance(value, np.ndarray) else self._from_list(value, where)
        if array.ndim != (1 if self.rows is None else 2):
            raise fail(where, f"expected {self._shape()}, found shape {list(array.shape)}", "MM008")
        if self.rows and array.shape[0] != self.rows:
            raise fail(where, f"expected {self.rows} rows, found {array.shape[0]}", "MM008")
        if array.size == 0:
            return np.ascontiguousarray(array, dtype=self.dtype)
        if self.dtype.startswith("int"):
            if array.dtype.kind not in "iu":
                raise fail(where, f"expected integers, found values of type {array.dtype}")
            low, high = array.min(), array.max()
            if (self.low is not None and low < self.low) or (
                self.high is not None and high > self.high
            ):
                bad = low if self.low is not None and low < self.low else high
                raise fail(where, f"{bad} is outside [{self.low}, {self.high}]")
        else:
            if array.dtype.kind not in "iuf":
                raise fail(where, f"expected numbers, found values of type {array.dtype}")
            finite = np.isfinite(array)
            if not finite.all():
                at = int(np.flatnonzero(~finite.reshape(-1))[0])
                raise fail(
                    f"{where}[{at}]", f"{array.reshape(-1)[at]} is not a finite number", "MM009"
                )
            if np.finfo(self.dtype).max < max(array.max(), -array.min()):
                raise fail(where, f"holds a number too large for {self.dtype}")
        return np.ascontiguousarray(array, dtype=self.dtype)

    def _from_list(self, value: Any, where: str) -> np.ndarray:
        if not isinstance(value, (list, tuple)):
            raise fail(where, f"expected {self._shape()}, found {shown(value)}")
        rows = [value] if self.rows is None else value
        for i, row in enumerate(rows):
            at = where if self.rows is None else f"{where}[{i}]"
            if not isinstance(row, (list, tuple, np.ndarray)):
                raise fail(at, f"expected an array, found {shown(row)}")
            if isinstance(row, np.ndarray) and (row.ndim != 1 or row.dtype.kind not in "iuf"):
                why = f"values of type {row.dtype} and shape {list(row.shape)}"
                raise fail(at, f"expected numbers [n], found {why}")
            if len(row) != len(rows[0]):
                raise fail(at, f"has {len(row)} values, row 0 has {len(rows[0])}", "MM008")
            if not isinstance(row, np.ndarray):
                wanted = {int} if self.dtype.startswith("int") else {int, float}
                if not set(map(type, row)) <= wanted:
                    kind = "an integer" if wanted == {int} else "a number"
                    j, odd = next((j, v) for j, v in enumerate(row) if type(v) not in wanted)
                    raise fail(f"{at}[{j}]", f"expected {kind}, found {shown(odd)}")
        try:
            array = np.asarray(value, dtype="int64" if self.dtype.startswith("int") else "float64")
        except OverflowError:
            raise fail(where, "holds an integer beyond 64 bits") from None
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


@dataclass(frozen=True)
class Json(Spec):
    """A free object: any JSON, of bounded depth, numbers finite."""

    def read(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise fail(where, f"expected an object, found {shown(value)}")
        check_json(value, where)
        return value

    def holds(self, value: Any) -> bool:
        # in memory it may hold anything; `write_trace` refuses what JSON has not
        return isinstance(value, dict)

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


@dataclass(frozen=True)
class Records(Spec):
    """A list of records of one dataclass."""

    cls: type[Record]

    def read(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise fail(where, f"expected an array of objects, found {shown(value)}")
        return [self.cls.from_dict(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def write(self, value: Any, numpy: bool) -> Any:
        if not isinstance(value, (list, tuple)):
            return value  # which `read` refuses
        return [item.to_dict(numpy) if isinstance(item, self.cls) else item for item in value]

    def holds(self, value: Any) -> bool:
        return type(value) is list and all(type(v) is self.cls and v.holds() for v in value)

    def taken(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        if self.holds(value):
            return value
        if not isinstance(value, (list, tuple)):
            name = self.cls.__name__
            faults.append(fail(where, f"is {shown(value)}, expected a list of {name}"))
            return value
        return [self._item(item, f"{where}[{i}]", faults) for i, item in enumerate(value)]

    def _item(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        if isinstance(value, self.cls):
            return value.taken(where, faults)
        faults.append(fail(where, f"is {shown(value)}, expected a {self.cls.__name__}"))
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"$ref": f"#/$defs/{self.cls.__name__}"}}


def column(spec: Spec, doc: str, default: Any = UNSET, factory: Any = UNSET) -> Any:
    """A dataclass field: its spec and its meaning; required unless it has a default."""
    metadata = {"spec": spec, "doc": doc}
    if factory is not UNSET:
        return field(default_factory=factory, metadata=metadata)
    return (
        field(metadata=metadata) if default is UNSET else field(default=default, metadata=metadata)
    )


class Record:
    """Base of the schema's dataclasses: reads, writes and compares itself by its fields' specs."""

    _columns: ClassVar[dict[str, Column]]

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """The declared fields by name, in order of declaration."""
        if "_columns" not in cls.__dict__:
            declared = [f for f in dataclasses.fields(cls) if "spec" in f.metadata]  # type: ignore[arg-type]
            cls._columns = {f.name: Column.of(f) for f in declared}
        return cls._columns

    @classmethod
    def from_dict(cls, value: Any, where: str | None = None) -> Any:
        """Build the record from parsed JSON (arrays may be numpy); unknown keys go to `metadata`.

        A null is an absent field. `where` begins the message of an error. Raises TraceError.
        """
        where = cls.__name__ if where is None else where
        if not isinstance(value, dict):
            raise fail(where, f"expected an object, found {shown(value)}")
        columns = cls.columns()
        known: dict[str, Any] = {}
        for name, declared in columns.items():
            given = value.get(name)
            if given is not None:
                known[name] = declared.spec.read(given, f"{where}.{name}")
            elif declared.required:
                raise fail(f"{where}.{name}", "is missing", "MM004")
        if not value.keys() <= columns.keys():
            unknown = {k: v for k, v in value.items() if k not in columns}
            for key, item in unknown.items():
                check_json(item, f"{where}.{named(str(key))}")
            known["metadata"] = keep_unknown(known.get("metadata", {}), unknown)
        return cls(**known)

    def to_dict(self, numpy: bool = False) -> dict[str, Any]:
        """The record as JSON values, absent fields and pixels left out; `from_dict` makes an equal one of it.

        `numpy`: arrays stay numpy instead of lists. Free objects (`metadata`, `processor`) are not copied.
        """
        out: dict[str, Any] = {}
        for name, declared in self.columns().items():
            value = getattr(self, name)
            if value is not None and (name != "metadata" or value):
                out[name] = declared.spec.write(value, numpy)
        return out

    def holds(self) -> bool:
        """Whether every field is as `read` gives it."""
        values = self.__dict__
        for name, declared in self.columns().items():
            value = values.get(name)
            if not declared.required if value is None else declared.spec.holds(value):
                continue
            return False
        return True

    def taken(self, where: str, faults: list[TraceError], prefix: str = ".") -> Any:
        """The record with fields as `read` gives them; faults are noted. Itself if it has them already."""
        changed: dict[str, Any] = {}
        for name, declared in self.columns().items():
            value, at = self.__dict__.get(name), f"{where}{prefix}{name}"
            if value is None and declared.required:
                faults.append(fail(at, "is missing", "MM004"))
            elif value is not None and not declared.spec.holds(value):
                changed[name] = declared.spec.taken(value, at, faults)
        if not changed:
            return self
        out = copy.copy(self)
        out.__dict__.update(changed)
        return out

    def __eq__(self, other: object) -> bool:
        """Equal in every declared field, arrays in dtype and shape too; pixels are not compared."""
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.columns())

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Column:
    """A declared field of a record."""

    spec: Spec
    doc: str
    required: bool

    @classmethod
    def of(cls, f: dataclasses.Field[Any]) -> Column:
        missing = dataclasses.MISSING
        required = f.default is missing and f.default_factory is missing
        return cls(f.metadata["spec"], f.metadata["doc"], required)


def keep_unknown(metadata: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    """Unknown fields join `metadata` under their names, with a `_` more where a name is taken."""
    out = dict(metadata)
    for name, value in unknown.items():
        while name in out and out[name] != value:
            name += "_"
        out[name] = value
    return out


def _tuple(value: Any, where: str, item: Spec, length: int | None) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise fail(where, f"expected an array, found {shown(value)}")
    if length is not None and len(value) != length:
        raise fail(where, f"expected {length} values, found {len(value)}", "MM008")
    return tuple(item.read(v, f"{where}[{i}]") for i, v in enumerate(value))


def _written(values: Any, kind: type, kinds: tuple[type, ...]) -> Any:
    """Plain numbers; what is none stays as it is, and `read` refuses it."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        return values
    return [kind(v) if isinstance(v, kinds) and not isinstance(v, bool) else v for v in values]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _array_schema(item: Spec, length: int | None) -> dict[str, Any]:
    bounds = {} if length is None else {"minItems": length, "maxItems": length}
    return {"type": "array", "items": item.schema()} | bounds
