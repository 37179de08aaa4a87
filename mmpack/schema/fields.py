"""Records: dataclasses whose fields are declared by specs, and that read, write and compare themselves by them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mmpack.errors import TraceError
from mmpack.schema.error_text import escaped, shown, trace_error
from mmpack.schema.plain_json import check_json
from mmpack.schema.specs import Spec

UNSET: Any = object()


@dataclass(frozen=True)
class Records(Spec):
    """A list of records of one dataclass."""

    cls: type[Record]

    def read(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise trace_error(where, f"expected an array of objects, found {shown(value)}")
        return [self.cls.from_dict(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def write(self, value: Any, numpy: bool) -> Any:
        if not isinstance(value, (list, tuple)):
            return value  # which `read` refuses
        return [item.to_dict(numpy) if isinstance(item, self.cls) else item for item in value]

    def holds(self, value: Any) -> bool:
        return type(value) is list and all(type(v) is self.cls and v.holds() for v in value)

    def checked(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        if not isinstance(value, (list, tuple)):
            name = self.cls.__name__
            faults.append(trace_error(where, f"is {shown(value)}, expected a list of {name}"))
            return value
        return [self._item(item, f"{where}[{i}]", faults) for i, item in enumerate(value)]

    def _item(self, value: Any, where: str, faults: list[TraceError]) -> Any:
        if isinstance(value, self.cls):
            return value.checked(where, faults)
        faults.append(trace_error(where, f"is {shown(value)}, expected a {self.cls.__name__}"))
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
    _checks: ClassVar[dict[str, Callable[[Any], bool]]]
    _needed: ClassVar[tuple[str, ...]]  # names of required fields

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
            raise trace_error(where, f"expected an object, found {shown(value)}")
        columns = cls.columns()
        known: dict[str, Any] = {}
        for name, declared in columns.items():
            given = value.get(name)
            if given is not None:
                known[name] = declared.spec.read(given, f"{where}.{name}")
            elif declared.required:
                raise trace_error(f"{where}.{name}", "is missing", "MM004")
        if not value.keys() <= columns.keys():
            unknown = {k: v for k, v in value.items() if k not in columns}
            for key, item in unknown.items():
                check_json(item, f"{where}.{escaped(str(key))}")
            known["metadata"] = keep_unknown(known.get("metadata", {}), unknown)
        return cls(**known)

    def to_dict(self, numpy: bool = False) -> dict[str, Any]:
        """The record as JSON values, absent fields and pixels left out; `from_dict` reads an equal one from it.

        `numpy`: arrays stay numpy instead of lists. Free objects (`metadata`, `processor`) are not copied.

        Example:
            >>> import mmpack as mp
            >>> mp.LossSpan(2, 4, turn=0).to_dict()
            {'start': 2, 'stop': 4, 'kind': 'response', 'turn': 0}
        """
        out: dict[str, Any] = {}
        for name, declared in self.columns().items():
            value = getattr(self, name)
            if value is not None and (name != "metadata" or value):
                out[name] = declared.spec.write(value, numpy)
        return out

    def holds(self) -> bool:
        """Whether every field is as `read` gives it."""
        cls, values = type(self), self.__dict__
        if "_checks" not in cls.__dict__:
            columns = cls.columns()
            cls._checks = {name: declared.spec.holds for name, declared in columns.items()}
            cls._needed = tuple(name for name, declared in columns.items() if declared.required)
        # most fields of most records are None: this is asked of every record of a pack
        for name, value in values.items():
            if value is not None and name in cls._checks and not cls._checks[name](value):
                return False
        return all(values.get(name) is not None for name in cls._needed)

    def checked(self, where: str, faults: list[TraceError], prefix: str = ".") -> Any:
        """The record with fields as `read` returns them, itself if it has them already; faults join `faults`."""
        changed: dict[str, Any] = {}
        for name, declared in self.columns().items():
            value = self.__dict__.get(name)
            if not declared.required if value is None else declared.spec.holds(value):
                continue
            at = f"{where}{prefix}{name}"
            if value is None:
                faults.append(trace_error(at, "is missing", "MM004"))
            else:
                made = declared.spec.checked(value, at, faults)
                changed |= {} if made is value else {name: made}
        if not changed:
            return self
        out = copy.copy(self)
        out.__dict__.update(changed)
        return out

    def __eq__(self, other: object) -> bool:
        """Equal in every declared field, arrays in dtype and shape too; pixels are not compared."""
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, name), getattr(other, name)) for name in self.columns())

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


def same(a: Any, b: Any) -> bool:
    """Whether two values of a field are equal: of one type; arrays in dtype and shape too."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)
