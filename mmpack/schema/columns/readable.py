"""Which rows `Sample.from_dict` surely reads: what the specs accept, by columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.schema.columns.table import UNREADABLE, Table
from mmpack.schema.fields import Records
from mmpack.schema.ragged import RaggedSpec, TeachersSpec
from mmpack.schema.routes import RoutesSpec
from mmpack.schema.sample import REPLAY, Sample
from mmpack.schema.specs import COUNT_MAX, Array, Json, Spec


def readable(table: Table) -> np.ndarray:
    """bool [n]: rows whose every field fits its spec; how fields fit together is left to the rules."""
    declared = Sample.columns()
    ok = np.ones(table.rows, bool)
    for name, column in declared.items():
        if column.required or name == "schema_version":
            ok &= table.present(name)
    for name, column in table.columns.items():
        if name in declared:
            check = partial(_fits, name=name, spec=declared[name].spec)
            ok &= table.once((readable, name), check, name)
        elif not _is_plain(column.type):
            ok &= ~table.present(name)
    old = np.array([version == "1" for version in table.values("schema_version")], bool)
    for name in REPLAY:  # unknown to version 1
        ok &= ~(old & table.present(name))
    return ok


def _fits(table: Table, name: str, spec: Spec) -> np.ndarray:
    """bool [n]: rows whose value fits, or that have none."""
    if isinstance(spec, Array):
        numbers = table.numbers(name)
        return np.zeros(table.rows, bool) if numbers is None else numbers.each(spec.reads_values)
    if isinstance(spec, RaggedSpec):
        numbers = table.numbers(name)
        if numbers is None:
            return ~table.present(name)
        return numbers.each(Array("int32", high=COUNT_MAX).reads_values)
    if isinstance(spec, Records):
        return table.items(name).good
    if isinstance(spec, TeachersSpec):
        return ~table.present(name)  # left to `Sample.from_dict`
    if isinstance(spec, RoutesSpec):
        stored = table.objects(name)
        return np.array([value is None or spec.reads(value) for value in stored], bool)
    if isinstance(spec, Json):
        return np.array([value is not UNREADABLE for value in table.objects(name)], bool)
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    column = table.columns[name]
    if column.type == spec.arrow_type(pyarrow) and spec.reads_column(column):
        return np.ones(table.rows, bool)
    return np.array([value is None or spec.reads(value) for value in table.values(name)], bool)


def _is_plain(kind: Any) -> bool:
    """Of a column that is no field: whether any sample can carry its values in `metadata`."""
    types = require("pyarrow", "parquet", "read_trace of a .parquet file").types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)
