"""Arrow: samples as tables whose columns are those of a Parquet trace, and pixels as raw bytes next to them.

What Ray Data and Hugging Face datasets hold. A table that was written as Parquet is a trace: `mp.read_trace` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.adapters.checks import check_kind
from mmpack.adapters.sample_columns import given_pixels, held_pixels
from mmpack.errors import require
from mmpack.schema.error_text import trace_error
from mmpack.schema.fields import Column
from mmpack.schema.jsonl import dump_json
from mmpack.schema.media import Medium
from mmpack.schema.parquet import AS_TEXT, Block, arrow_type_of, to_arrow
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.trace import MAX_RECORD_BYTES

PIXELS = "pixels"
_PURPOSE = "a table of samples"


def arrow_schema(pixels: bool = True) -> Any:
    """pyarrow's schema of `to_table`: lists of numbers, strings, JSON text; `pixels`: raw bytes by cache key."""
    pyarrow = require("pyarrow", "parquet", _PURPOSE)
    fields = [(name, arrow_type_of(c.spec, pyarrow)) for name, c in _columns().items()]
    return pyarrow.schema([*fields, (PIXELS, _pixel_type(pyarrow))] if pixels else fields)


def to_table(samples: Sequence[Sample], pixels: bool = True) -> Any:
    """A pyarrow Table, a row per sample, checked as `write_trace` checks. `pixels`: those that media hold go along.

    Raises: TraceError, ArgumentError.
    """
    pyarrow = require("pyarrow", "parquet", _PURPOSE)
    given = as_samples(samples, "to_table")
    rows = []
    for i, sample in enumerate(given):
        checked = Sample.from_dict(sample.to_dict(numpy=True), f"to_table: samples[{i}]")
        record = checked.to_dict(numpy=True)
        rows.append({n: dump_json(v) if _is_text(n) else v for n, v in record.items()})
    schema = arrow_schema(pixels)
    if not rows:
        return schema.empty_table()
    columns = [
        to_arrow(name, [row.get(name) for row in rows], pyarrow)
        for name in schema.names
        if name != PIXELS
    ]
    if pixels:
        held = [[_entry(m, s.family) for m in s.media if m.pixel_values is not None] for s in given]
        columns.append(pyarrow.array(held, _pixel_type(pyarrow)))
    return pyarrow.Table.from_arrays(columns, schema=schema)


def from_table(table: Any, where: str = "from_table") -> list[Sample]:
    """The samples of `to_table`'s rows. Pixels are read-only views of the table's bytes: numpy, bfloat16 a tensor.

    Columns that are no field of Sample join `metadata`, as in a trace. Raises: TraceError, ArgumentError.
    """
    pyarrow = require("pyarrow", "parquet", _PURPOSE)
    if isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    check_kind(f"{where}: this", table, pyarrow.Table, "pass a pyarrow.Table that to_table made")
    out: list[Sample] = []
    for batch in table.to_batches():
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        held = columns.pop(PIXELS, None)
        columns = {n: _plain(c, pyarrow) for n, c in columns.items() if c.null_count < len(c)}
        block = Block(where, len(out), batch.num_rows, columns, MAX_RECORD_BYTES)
        for i, (number, record) in enumerate(block.records()):
            sample = Sample.from_dict(record, f"{where}: record {number}")
            _give_pixels(sample, held[i] if held is not None else None, f"{where}: record {number}")
            out.append(sample)
    return out


def _columns() -> dict[str, Column]:
    return Sample.columns()


def _is_text(name: str) -> bool:
    return isinstance(_columns()[name].spec, AS_TEXT)


def _pixel_type(pyarrow: Any) -> Any:
    parts = [
        ("cache_key", pyarrow.string()),
        ("dtype", pyarrow.string()),
        ("shape", pyarrow.list_(pyarrow.int64())),
        ("data", pyarrow.large_binary()),
    ]
    return pyarrow.list_(pyarrow.struct(parts))


def _plain(column: Any, pyarrow: Any) -> Any:
    """Lists and strings as the reader of traces has them: others hand out large ones."""
    kind = column.type
    if pyarrow.types.is_large_list(kind):
        inner = pyarrow.list_(kind.value_type)
        return column.cast(inner)
    return column.cast(pyarrow.string()) if pyarrow.types.is_large_string(kind) else column


def _entry(medium: Medium, family: str) -> dict[str, Any]:
    values = held_pixels(medium.pixel_values, family)
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype == "bfloat16":  # which numpy does not have
        import torch

        data = values.detach().cpu().contiguous().view(torch.int16).numpy()
    else:
        data = np.ascontiguousarray(values)
    shape = list(values.shape)
    return {"cache_key": medium.cache_key, "dtype": dtype, "shape": shape, "data": data.tobytes()}


def _give_pixels(sample: Sample, held: Any, where: str) -> None:
    """Pixels to the media that they are of; bytes stay where they are."""
    if held is None or not held.is_valid:
        return
    found = {}
    for entry in held:
        key, dtype = entry["cache_key"].as_py(), entry["dtype"].as_py()
        shape, data = entry["shape"].as_py(), entry["data"].as_buffer()
        try:
            found[key] = _array(data, dtype, shape)
        except (TypeError, ValueError) as error:
            raise trace_error(f"{where}.{PIXELS}", f"can't be read: {error}", "MM008") from None
    for medium in sample.media:
        medium.pixel_values = given_pixels(found.get(medium.cache_key), sample.family)


def _array(data: Any, dtype: str, shape: list[int]) -> Any:
    if dtype == "bfloat16":
        import torch

        whole = np.frombuffer(data, np.int16).reshape(shape).copy()
        return torch.from_numpy(whole).view(torch.bfloat16)
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
