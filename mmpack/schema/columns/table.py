"""Columns of n rows of one family, each parsed once, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np

from mmpack.errors import TraceError, require
from mmpack.families import Family
from mmpack.schema.columns.items import Items, items, parse
from mmpack.schema.columns.numbers import Numbers, numbers
from mmpack.schema.fields import Records
from mmpack.schema.parquet import parse_text
from mmpack.schema.ragged import RaggedSpec
from mmpack.schema.sample import Sample
from mmpack.schema.specs import Array, Json

T = TypeVar("T")
UNREADABLE: Any = object()  # in place of an object that reading may refuse


class Table:
    """Columns of n rows, parsed when they are asked for; those without a value are left out."""

    def __init__(
        self, columns: dict[str, Any], lists: dict[str, Any], rows: int, family: Family
    ) -> None:
        self.columns = {name: c for name, c in columns.items() if c.null_count < rows}
        self.lists = lists  # see `parsed_lists`
        self.rows = rows
        self.family = family
        self.other: Table | None = None
        self.shared: set[str] = set()
        self._made: dict[Hashable, Any] = {}

    def share(self, other: Table) -> None:
        """Use what `other` makes of the columns that are equal in both tables."""
        self.other = other
        self.shared = {
            name
            for name in self.columns.keys() & other.columns.keys()
            if self.columns[name] is other.columns[name]
            or self.columns[name].equals(other.columns[name])
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
        return self.once(name, lambda table: table.columns[name].to_pylist(), name)

    def numbers(self, name: str) -> Numbers | None:
        """A column of lists of numbers; None if there is none, it is of another type or has a null within."""
        if name not in self.columns:
            return None
        spec = Sample.columns()[name].spec
        rows = isinstance(spec, Array) and spec.rows is not None
        depth = 2 if rows or isinstance(spec, RaggedSpec) else 1
        return self.once((numbers, name), lambda table: numbers(table.columns[name], depth), name)

    @property
    def ids(self) -> Numbers:
        """`input_ids`, which every readable row has."""
        ids = self.numbers("input_ids")
        assert ids is not None
        return ids

    def objects(self, name: str) -> list[Any]:
        """Free objects, one and the same for equal texts; None where there is none, UNREADABLE for what is none."""
        return self.once((_objects, name), lambda table: _objects(table.values(name)), name)

    def items(self, name: str) -> Items:
        """A column of records."""
        spec: Any = Sample.columns()[name].spec
        return self.once(
            (items, name),
            lambda t: items(t.columns.get(name), t.lists.get(name), t.rows, spec.cls),
            name,
        )

    def once(self, key: Hashable, make: Callable[[Table], T], *names: str) -> T:
        """`make` of the table, once; of the other one where both have the columns `names`, and equal ones."""
        if self.other is not None and not (
            (self.columns.keys() | self.other.columns.keys()).intersection(names) - self.shared
        ):
            return self.other.once(key, make, *names)
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


def _objects(texts: list[Any]) -> list[Any]:
    if not all(isinstance(text, str | None) for text in texts):
        return [UNREADABLE] * len(texts)
    made = {text: None if text is None else _object(text) for text in dict.fromkeys(texts)}
    return [made[text] for text in texts]


def _object(text: str) -> Any:
    try:
        return Json().read(parse_text(text, 0, ""), "")
    except TraceError:
        return UNREADABLE
