"""A column of records, one JSON text per row, as columns of their fields.

Arrow parses it where it has a type for every field and all values surely fit; else Python reads each text.
n rows, m records in all of them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import TraceError, require
from mmpack.schema.fields import Record, Records
from mmpack.schema.parquet import parse_text
from mmpack.schema.specs import Spec

MAX_JSON_BYTES = 2**30  # that Arrow parses at a time; its offsets are of 32 bits
# of text, on average: Arrow holds every field of an object, also of an empty one
MIN_OBJECT_BYTES = 16
HALF_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates: Arrow can't hold it
Field = Any  # an Arrow array, or a list where Arrow has no type for the values


@dataclass
class Items:
    """The records of a column, by field: null where a record lacks it. Rows that are not `good` have none here."""

    good: np.ndarray  # bool [n]
    row: np.ndarray  # [m]
    fields: dict[str, Field]

    @property
    def counts(self) -> np.ndarray:
        """int64 [n]."""
        return np.bincount(self.row, minlength=len(self.good))

    @property
    def first(self) -> np.ndarray:
        """int64 [n]: where the records of each row begin."""
        return np.cumsum(self.counts) - self.counts

    def values(self, name: str) -> list[Any]:
        """[m], as Python has them."""
        return _listed(self.fields.get(name), len(self.row))

    def has(self, name: str) -> np.ndarray:
        """bool [m]."""
        field = self.fields.get(name)
        if field is None:
            return np.zeros(len(self.row), bool)
        if isinstance(field, list):
            return np.array([v is not None for v in field], bool)
        return field.is_valid().to_numpy(zero_copy_only=False)

    def numbers(self, name: str, missing: float = -1) -> np.ndarray:
        """[m] integers or floats, `missing` where a record lacks it."""
        field = self.fields.get(name)
        if field is None:
            return np.full(len(self.row), missing)
        return (field.fill_null(missing) if field.null_count else field).to_numpy()

    def codes(self, name: str, among: Sequence[str]) -> np.ndarray:
        """[m] index of a text `among` these."""
        if name not in self.fields:
            return np.zeros(len(self.row), np.int64)
        compute = require("pyarrow.compute", "parquet", "read_trace of a .parquet file")
        texts = require("pyarrow", "parquet", "read_trace of a .parquet file").array(among)
        return compute.index_in(self.fields[name], value_set=texts).fill_null(-1).to_numpy()

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Lengths [m] of a field of lists, -1 where a record lacks it; the numbers in all of them."""
        field = self.fields.get(name)
        if field is None:
            return np.full(len(self.row), -1), np.zeros(0)
        return field.value_lengths().fill_null(-1).to_numpy(), field.flatten().to_numpy()

    def is_unique(self, name: str) -> bool:
        """Whether no two records have the same text."""
        return name not in self.fields or len(self.fields[name].unique()) == len(self.row)

    def same(self, other: Items, mine: np.ndarray, theirs: np.ndarray, name: str) -> np.ndarray:
        """bool [k]: records `mine` [k] and `theirs` [k] have equal values, or both have none."""
        a, b = (_picked(s.fields.get(name), at) for s, at in ((self, mine), (other, theirs)))
        lists = isinstance(a, list | None) or isinstance(b, list | None)
        if a is b or (not lists and a.equals(b)):
            return np.ones(len(mine), bool)
        pairs = zip(_listed(a, len(mine)), _listed(b, len(mine)), strict=True)
        return np.array([x == y for x, y in pairs], bool)


def items(texts: Any, lists: Any, rows: int, cls: type[Record]) -> Items:
    """The records of an Arrow column of texts, None without values; `lists` is what `parse` returned for it."""
    if texts is None:
        return Items(np.ones(rows, bool), np.zeros(0, np.int64), {})
    found = None if lists is None else _by_arrow(lists, cls)
    return _by_python(texts, cls) if found is None else found


def parse(texts: Any, cls: Any) -> Any:
    """A column of lists of structs, one per text; None where Arrow may see another thing than Python.

    Arrow refuses another type, a key that is unknown or comes twice, and half a surrogate pair; and reads more rows
    than there are texts if one of them closes its own list and opens another.
    """
    kind = _struct(cls)
    types = require("pyarrow", "parquet", "read_trace of a .parquet file").types
    return None if kind is None or not types.is_string(texts.type) else _read_json(texts, kind)


def _listed(field: Field, count: int) -> list[Any]:
    if field is None:
        return [None] * count
    return field if isinstance(field, list) else field.to_pylist()


def _picked(field: Field, at: np.ndarray) -> Field:
    if field is None or len(at) == len(field):  # `at` is sorted: then it holds all of them
        return field
    return [field[i] for i in at.tolist()] if isinstance(field, list) else field.take(at)


# ---- by Arrow ------------------------------------------------------------------------------------


@functools.cache
def _struct(cls: Any) -> Any:
    """Arrow's type of a record without `metadata`; None if a field has no type of Arrow's."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    specs = {name: c.spec for name, c in cls.columns().items() if name != "metadata"}
    types = {name: spec.arrow_type(pyarrow) for name, spec in specs.items()}
    return None if None in types.values() else pyarrow.struct(list(types.items()))


def _read_json(texts: Any, kind: Any) -> Any:
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    compute = require("pyarrow.compute", "parquet", "read_trace of a .parquet file")
    reader = require("pyarrow.json", "parquet", "read_trace of a .parquet file")
    if texts.null_count:
        texts = texts.fill_null("[]")
    objects = compute.sum(compute.count_substring(texts, "{")).as_py() or 0
    if texts.nbytes > MAX_JSON_BYTES or texts.nbytes < MIN_OBJECT_BYTES * objects:
        return None
    lines = compute.binary_join_element_wise('{"rows":', texts, "}\n", "")
    offsets, data = lines.buffers()[1:]
    size = int(np.frombuffer(offsets, np.int32)[lines.offset + len(lines)])
    try:
        table = reader.read_json(
            pyarrow.BufferReader(data.slice(0, size)),
            read_options=reader.ReadOptions(use_threads=False, block_size=size + 1),
            parse_options=reader.ParseOptions(
                explicit_schema=pyarrow.schema([("rows", pyarrow.list_(kind))]),
                unexpected_field_behavior="error",
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    return table["rows"].combine_chunks() if table.num_rows == len(texts) else None


def _by_arrow(lists: Any, cls: type[Record]) -> Items | None:
    """None unless every field of every record surely fits its spec."""
    records = lists.flatten()
    if lists.null_count or records.null_count:
        return None
    fields = dict(zip((f.name for f in records.type), records.flatten(), strict=True))
    for name, field in fields.items():
        declared = cls.columns()[name]
        if field.null_count and declared.required:
            return None
        if field.null_count < len(field) and not declared.spec.reads_column(field):
            return None
    row = np.repeat(np.arange(len(lists)), lists.value_lengths().to_numpy())
    fields = {name: field for name, field in fields.items() if field.null_count < len(field)}
    return Items(np.ones(len(lists), bool), row, fields)


# ---- by Python -----------------------------------------------------------------------------------


def _by_python(texts: Any, cls: type[Record]) -> Items:
    found = [[] if text is None else _read(text, cls) for text in texts.to_pylist()]
    good = np.array([records is not None for records in found], bool)
    row = np.repeat(np.arange(len(found)), [len(records or ()) for records in found])
    every = [record for records in found for record in records or ()]
    fields: dict[str, Field] = {}
    for name, declared in cls.columns().items():
        values = [getattr(record, name) for record in every]
        if any(v is not None for v in values):
            fields[name] = _as_arrow(declared.spec, values)
    return Items(good, row, fields)


def _read(text: Any, cls: type[Record]) -> list[Any] | None:
    """The records of one text; None where reading refuses it, or Arrow can't hold it."""
    try:
        value = parse_text(text, 0, "")
        records = Records(cls).read(value, "")
    except TraceError:
        return None
    escaped = "\\ud" in text.lower()
    return None if escaped and HALF_PAIR.search(json.dumps(value, ensure_ascii=False)) else records


def _as_arrow(spec: Spec, values: list[Any]) -> Field:
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    kind = spec.arrow_type(pyarrow)
    return values if kind is None else pyarrow.array(values, kind)
