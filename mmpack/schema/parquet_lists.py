"""List columns of a Parquet trace, from Arrow's buffers to numpy and back: arrays, ragged lists, teachers.

Of a list of lists, the offsets are those of the column: no Python object per list.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from mmpack.errors import require
from mmpack.schema.error_text import trace_error
from mmpack.schema.ragged import TeachersSpec
from mmpack.schema.specs import Array

# ---- reading -------------------------------------------------------------------------------------


def read_arrays(column: Any, name: str, path: str, first: int) -> list[np.ndarray | None]:
    """The rows of a list column as views into it; of a list of lists, as 2-D ones."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    where, types = f"{path}: {name}", pyarrow.types
    values, bounds = _flat(column, where, pyarrow)
    inner = None
    if types.is_nested(values.type):
        _refuse_nulls(values, [bounds], f"{path}: record", name, first)
        values, inner = _flat(values, where, pyarrow)
    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        raise trace_error(where, f"is a column of {column.type}, expected lists of numbers")
    _refuse_nulls(
        values, [bounds] if inner is None else [inner, bounds], f"{path}: record", name, first
    )
    flat = values.to_numpy(zero_copy_only=True)
    out: list[np.ndarray | None] = []
    present = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if not present[i]:
            out.append(None)
        elif inner is None:
            out.append(flat[start:stop])
        else:
            widths = np.diff(inner[start : stop + 1])
            if (widths != widths[:1]).any():
                raise trace_error(
                    f"{path}: record {first + i}.{name}", "has rows of unlike length", "MM008"
                )
            row = flat[inner[start] : inner[stop]]
            out.append(row.reshape(len(widths), -1 if len(row) else 0))
    return out


def read_ragged(column: Any, name: str, path: str, first: int) -> list[dict[str, Any] | None]:
    """The rows of a column of lists of lists of ids, as `RaggedSpec` reads them; copies."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    where, types = f"{path}: {name}", pyarrow.types
    lists, outer = _flat(column, where, pyarrow)
    _refuse_nulls(lists, [outer], f"{path}: record", name, first)
    values, inner = _flat(lists, where, pyarrow)
    if not types.is_integer(values.type):
        raise trace_error(where, f"is a column of {column.type}, expected lists of lists of ids")
    _refuse_nulls(values, [inner, outer], f"{path}: record", name, first)
    flat = values.to_numpy(zero_copy_only=True)
    present = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    out: list[dict[str, Any] | None] = []
    for here, (start, stop) in zip(present, pairwise(outer.tolist()), strict=True):
        offsets = inner[start : stop + 1].astype(np.int64)
        ids = flat[offsets[0] : offsets[-1]].copy()
        out.append({"offsets": offsets - offsets[0], "ids": ids} if here else None)
    return out


def read_teachers(column: Any, name: str, path: str, first: int) -> list[dict[str, Any] | None]:
    """The rows of a column of teachers, as `TeachersSpec` reads them; copies."""
    pyarrow = require("pyarrow", "parquet", "read_trace of a .parquet file")
    where = f"{path}: {name}"
    try:
        column.validate(full=True)  # names are texts, which may be no UTF-8
    except pyarrow.ArrowInvalid as error:
        why = " ".join(str(error).split())[:200]
        raise trace_error(where, f"can't be read as Parquet: {why}", "MM001") from None
    entries, bounds = _flat(column, where, pyarrow)
    _refuse_nulls(entries, [bounds], f"{path}: record", name, first)
    fields = [f.name for f in entries.type] if pyarrow.types.is_struct(entries.type) else []
    if sorted(fields) != ["ids", "logprobs", "name"]:
        why = f"is a column of {column.type}, expected lists of name, ids and logprobs"
        raise trace_error(where, why)
    parts = dict(zip(fields, entries.flatten(), strict=True))
    names = parts["name"].to_pylist()
    lists = read_ragged(parts["ids"], f"{name}.ids", path, first)
    logprobs = read_arrays(parts["logprobs"], f"{name}.logprobs", path, first)
    present = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    out: list[dict[str, Any] | None] = []
    for i, (here, (start, stop)) in enumerate(
        zip(present, pairwise(bounds.tolist()), strict=True), first
    ):
        row = {
            names[k]: {**(lists[k] or {}), "logprobs": _copied(logprobs[k])}
            for k in range(start, stop)
        }
        if len(row) < stop - start:
            raise trace_error(f"{path}: record {i}.{name}", "has two teachers of one name")
        out.append(row if here else None)
    return out


def _copied(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else values.copy()


def _flat(column: Any, where: str, pyarrow: ModuleType) -> tuple[Any, np.ndarray]:
    """A list array's values and its offsets into them; of a slice, only those of the slice."""
    if pyarrow.types.is_fixed_size_list(column.type):
        column = column.cast(pyarrow.list_(column.type.value_type))
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        raise trace_error(where, f"is a column of {column.type}, expected lists of numbers")
    bounds = column.offsets.to_numpy(zero_copy_only=True)
    start, stop = int(bounds[0]), int(bounds[-1])
    return column.values.slice(start, stop - start), bounds - start


def _refuse_nulls(values: Any, levels: list[np.ndarray], where: str, name: str, first: int) -> None:
    if values.null_count:
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        for offsets in levels:
            at = int(np.searchsorted(offsets, at, "right")) - 1
        raise trace_error(f"{where} {first + at}.{name}", "has a null among its values")


# ---- writing -------------------------------------------------------------------------------------


def arrays_to_arrow(values: list[Any], spec: Array, pyarrow: ModuleType) -> Any:
    """Write arrays [n] or [rows, n], or None, as a column of lists."""
    missing = pyarrow.array([v is None for v in values], pyarrow.bool_())
    rows = [
        np.zeros((0,) * (1 if spec.rows is None else 2), spec.dtype) if v is None else v
        for v in values
    ]
    flat = pyarrow.array(np.concatenate([row.reshape(-1) for row in rows]).astype(spec.dtype))
    if spec.rows is not None:
        widths = [row.shape[1] for row in rows for _ in range(row.shape[0])]
        flat = pyarrow.ListArray.from_arrays(_offsets(widths), flat)
    return pyarrow.ListArray.from_arrays(_offsets([len(r) for r in rows]), flat, mask=missing)


def ragged_to_arrow(values: list[Any], pyarrow: ModuleType) -> Any:
    """Write values of `RaggedSpec.write`, or None, as a column of lists of lists."""
    missing = pyarrow.array([v is None for v in values], pyarrow.bool_())
    given = [v for v in values if v is not None]
    lengths = [np.diff(v["offsets"]) for v in given]
    ids = np.concatenate([np.zeros(0, np.int32), *(v["ids"] for v in given)])
    lists = pyarrow.ListArray.from_arrays(
        _offsets(np.concatenate([np.zeros(0, np.int64), *lengths])), pyarrow.array(ids)
    )
    counts = [0 if v is None else len(v["offsets"]) - 1 for v in values]
    return pyarrow.ListArray.from_arrays(_offsets(counts), lists, mask=missing)


def teachers_to_arrow(values: list[Any], pyarrow: ModuleType) -> Any:
    """Write values of `TeachersSpec.write`, or None, as a column of lists of structs."""
    missing = pyarrow.array([v is None for v in values], pyarrow.bool_())
    entries = [entry for v in values for entry in (v or {}).items()]
    scores = [lists["logprobs"] for _, lists in entries]
    kind = TeachersSpec().arrow_type(pyarrow).value_type
    parts = [
        _texts([name for name, _ in entries], pyarrow),
        ragged_to_arrow([lists for _, lists in entries], pyarrow),
        arrays_to_arrow(scores, Array("float32"), pyarrow)
        if scores
        else pyarrow.array([], kind.field("logprobs").type),
    ]
    structs = pyarrow.StructArray.from_arrays(parts, fields=list(kind))
    counts = [len(v or {}) for v in values]
    return pyarrow.ListArray.from_arrays(_offsets(counts), structs, mask=missing)


def _texts(texts: list[str], pyarrow: ModuleType) -> Any:
    try:
        return pyarrow.array(texts, pyarrow.string())
    except UnicodeEncodeError:
        why = "a name has half a surrogate pair, Parquet can't hold it"
        raise trace_error("write_trace: teachers", why) from None


def _offsets(lengths: Any) -> np.ndarray:
    return np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64).astype(np.int32)
