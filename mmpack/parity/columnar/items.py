"""A column of records, one JSON text a row, as columns of their fields.

Arrow parses them where it knows the type of every field and finds nothing odd; the rest is Python's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.parity.columnar.texts import each_fits, parsed
from mmpack.schema.fields import INT_MAX, Array, Float, Floats, Int, Ints, Record, Spec, Str

MAX_JSON_BYTES = 2**30  # that Arrow is given at a time; its offsets are of 32 bits
MIN_OBJECT_BYTES = (
    16  # of text, on average: Arrow holds every field of an object, also of an empty one
)
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

    def values(self, name: str) -> list[Any]:
        """[m], as Python has them."""
        field = self.fields.get(name)
        if field is None:
            return [None] * len(self.row)
        return field if isinstance(field, list) else field.to_pylist()

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
        if a is b or (
            not isinstance(a, list | None) and not isinstance(b, list | None) and a.equals(b)
        ):
            return np.ones(len(mine), bool)
        mine_too, theirs_too = (
            [None] * len(mine) if v is None else v if isinstance(v, list) else v.to_pylist()
            for v in (a, b)
        )
        return np.array([x == y for x, y in zip(mine_too, theirs_too, strict=True)], bool)


def _picked(field: Field, at: np.ndarray) -> Field:
    if field is None or len(at) == len(field):  # rising places: then all of them
        return field
    return [field[i] for i in at.tolist()] if isinstance(field, list) else field.take(at)


def items(texts: Any, lists: Any, rows: int, cls: type[Record]) -> Items:
    """The records of an Arrow column of texts, None without values, and what `parse` made of it."""
    if texts is None:
        return Items(np.ones(rows, bool), np.zeros(0, np.int64), {})
    return _by_python(texts, cls) if lists is None else _by_arrow(lists, cls)


def parse(texts: Any, cls: Any) -> Any:
    """A column of lists of structs, one for each text; None where Arrow may see another thing than Python.

    Arrow refuses another type, a key that is unknown or comes twice, and half a surrogate pair; and reads more rows
    than there are texts if one of them closes its own list and opens another.
    """
    kind = _arrow_type(cls)
    types = require("pyarrow", "parquet", "read_trace of a .parquet file").types
    return None if kind is None or not types.is_string(texts.type) else _read_json(texts, kind)


# ---- by Arrow ------------------------------------------------------------------------------------


@functools.cache
def _arrow_type(cls: Any) -> Any:
    """The struct of a record's fields without `metadata`; None if a field has no type of Arrow's."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    columns = {name: c.spec for name, c in cls.columns().items() if name != "metadata"}
    types = {name: _value_type(spec, pyarrow) for name, spec in columns.items()}
    return None if None in types.values() else pyarrow.struct(list(types.items()))


def _value_type(spec: Spec, pyarrow: Any) -> Any:
    match spec:
        case Str(pattern=""):
            return pyarrow.string()
        case Int():
            return pyarrow.int64()
        case Float():
            return pyarrow.float64()
        case Floats():
            return pyarrow.list_(pyarrow.float64())
        case Ints() | Array(dtype="int64", rows=None, low=int(), high=int()):
            return pyarrow.list_(pyarrow.int64())
    return None


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


def _by_arrow(lists: Any, cls: type[Record]) -> Items:
    good = lists.is_valid().to_numpy(zero_copy_only=False).copy()
    records = lists.flatten()
    row = np.repeat(np.arange(len(lists)), lists.value_lengths().fill_null(0).to_numpy())
    fields = dict(zip((f.name for f in records.type), records.flatten(), strict=True))
    wrong = records.is_null().to_numpy(zero_copy_only=False).copy()
    for name, declared in cls.columns().items():
        if name in fields:
            field = fields[name]
            if declared.required and field.null_count:
                wrong |= field.is_null().to_numpy(zero_copy_only=False)
            if field.null_count < len(field):
                wrong |= _unfit(declared.spec, field)
    fields = {name: field for name, field in fields.items() if field.null_count < len(field)}
    return _without(Items(good, row, fields), wrong)


def _unfit(spec: Spec, field: Any) -> np.ndarray:
    """bool [m]: values that `spec.read` may refuse; nulls are none."""
    if isinstance(spec, Str):
        return _not_among(spec.choices, field)
    if isinstance(spec, Int):
        values = field.fill_null(spec.low).to_numpy()
        return (values < spec.low) | (values > spec.high)
    if isinstance(spec, Float):
        return ~(np.abs(field.fill_null(0.0).to_numpy()) <= INT_MAX)  # Infinity is JSON to Arrow
    if isinstance(spec, Floats):
        return _unfit_lists(Float(), spec.length, field)
    assert isinstance(spec, Ints | Array)  # see _value_type
    length = spec.length if isinstance(spec, Ints) else None
    return _unfit_lists(Int(spec.low or 0, spec.high or 0), length, field)


def _unfit_lists(item: Spec, length: int | None, field: Any) -> np.ndarray:
    lengths, inner = field.value_lengths().fill_null(-1).to_numpy(), field.flatten()
    bad = _unfit(item, inner) | inner.is_null().to_numpy(zero_copy_only=False)
    wrong = (lengths >= 0) & (lengths != length) & (length is not None)
    if bad.any():
        wrong[np.repeat(np.arange(len(field)), np.maximum(lengths, 0))[bad]] = True
    return wrong


def _not_among(choices: Sequence[str], field: Any) -> np.ndarray:
    if not choices:
        return np.zeros(len(field), bool)
    compute = require("pyarrow.compute", "parquet", "read_trace of a .parquet file")
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    among = compute.is_in(field, value_set=pyarrow.array([*choices, None]))
    return ~among.to_numpy(zero_copy_only=False)


def _without(all_items: Items, wrong: np.ndarray) -> Items:
    """Rows with an item that is wrong are not good, and have none."""
    good, row, fields = all_items.good, all_items.row, all_items.fields
    if not wrong.any():
        return all_items
    good[row[wrong]] = False
    kept = np.flatnonzero(good[row])
    return Items(good, row[kept], {name: _picked(f, kept) for name, f in fields.items()})


# ---- by Python -----------------------------------------------------------------------------------


def _by_python(texts: Any, cls: type[Record]) -> Items:
    lists = [[] if text is None else parsed(text) for text in texts.to_pylist()]
    good = np.array([type(v) is list and set(map(type, v)) <= {dict} for v in lists], bool)
    lists = [v if ok else [] for v, ok in zip(lists, good.tolist(), strict=True)]
    row = np.repeat(np.arange(len(lists)), [len(v) for v in lists])
    records: list[dict[str, Any]] = list(chain.from_iterable(lists))
    names = dict.fromkeys(chain.from_iterable(records))
    given = {name: [record.get(name) for record in records] for name in names}
    found = _without(Items(good, row, given), _misfits(given, len(row), cls))
    fields = {
        name: _as_arrow(c.spec, found.fields[name])
        for name, c in cls.columns().items()
        if any(v is not None for v in found.fields.get(name, ()))
    }
    return Items(found.good, found.row, fields)


def _misfits(fields: dict[str, list[Any]], count: int, cls: type[Record]) -> np.ndarray:
    """bool [m]: items that don't surely fit."""
    wrong = np.zeros(count, bool)
    if not count:
        return wrong
    columns = cls.columns()
    for name, values in fields.items():
        if name in columns:
            wrong |= ~each_fits(columns[name].spec, values)
        else:
            wrong |= [v is not None for v in values]
    for name, declared in columns.items():
        if declared.required:
            wrong |= [v is None for v in fields[name]] if name in fields else True
    return wrong


def _as_arrow(spec: Spec, values: list[Any]) -> Field:
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    kind = _value_type(spec, pyarrow)
    if kind is None:
        return values
    if isinstance(spec, Float):
        values = [None if v is None else float(v) for v in values]
    return pyarrow.array(values, kind)
