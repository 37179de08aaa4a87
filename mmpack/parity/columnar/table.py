"""Columns of many rows, each parsed once, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from mmpack.errors import require
from mmpack.families import Family
from mmpack.parity.columnar.items import Items, items, parse
from mmpack.parity.columnar.numbers import Numbers, numbers
from mmpack.parity.columnar.texts import objects
from mmpack.schema.fields import Array, Records
from mmpack.schema.sample import Sample

T = TypeVar("T")


class Rows:
    """Columns of n rows, parsed when they are asked for; those without a value are left out."""

    def __init__(
        self, columns: dict[str, Any], lists: dict[str, Any], rows: int, family: Family
    ) -> None:
        self.columns = {name: c for name, c in columns.items() if c.null_count < rows}
        self.lists = lists
        self.rows = rows
        self.family = family
        self.twin: Rows | None = None
        self.shared: set[str] = set()
        self._made: dict[str, Any] = {}

    def adopt(self, other: Rows) -> None:
        """Take over what `other` made of the columns that are equal on both sides."""
        self.twin = other
        self.shared = {
            name
            for name, column in self.columns.items()
            if name in other.columns
            and (column is other.columns[name] or column.equals(other.columns[name]))
        }

    def present(self, name: str) -> np.ndarray:
        """bool [n]."""
        if name not in self.columns:
            return np.zeros(self.rows, bool)
        return self.columns[name].is_valid().to_numpy(zero_copy_only=False)

    def values(self, name: str) -> list[Any]:
        """Texts and scalars as Python has them."""
        if name not in self.columns:
            return [None] * self.rows
        return self.once(name, lambda rows: rows.columns[name].to_pylist())

    def numbers(self, name: str) -> Numbers | None:
        """A column of lists of numbers; None if there is none, it is of another type or has a null within."""
        if name not in self.columns:
            return None
        spec = Sample.columns()[name].spec
        depth = 2 if isinstance(spec, Array) and spec.rows is not None else 1
        return self.once(name, lambda rows: numbers(rows.columns[name], depth))

    def objects(self, name: str) -> list[Any]:
        """Free objects; None where there is none, DOUBTED for what is none."""
        return self.once(f"{name} as objects", lambda rows: objects(rows.values(name)), name)

    def items(self, name: str) -> Items:
        """A column of records."""
        spec: Any = Sample.columns()[name].spec
        return self.once(
            f"{name} as items",
            lambda rows: items(rows.columns.get(name), rows.lists.get(name), rows.rows, spec.cls),
            *([name] if name in self.columns else []),
        )

    def once(self, key: str, make: Callable[[Rows], T], *names: str) -> T:
        """`make` of the rows, made once, by the twin if the columns `names` (else `key`) are equal there."""
        if self.twin is not None and self.shared.issuperset(names or (key,)):
            return self.twin.once(key, make, *names)
        if key not in self._made:
            self._made[key] = make(self)
        return self._made[key]


def parsed_lists(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of records that Arrow can parse, as lists of structs."""
    specs = {name: c.spec for name, c in Sample.columns().items() if name in columns}
    made = {n: parse(columns[n], s.cls) for n, s in specs.items() if isinstance(s, Records)}
    return {name: lists for name, lists in made.items() if lists is not None}


def take(columns: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """Those rows of each column."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    index = pyarrow.array(np.fromiter(rows, np.int64))
    return {name: column.take(index) for name, column in columns.items()}
