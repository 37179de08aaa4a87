"""A sample as named columns: arrays as they are, pixels by cache key, all else as one JSON text.

What TensorDict and TransferQueue hold. Arrays are not copied, either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES
from mmpack.schema.error_text import trace_error
from mmpack.schema.jsonl import dump_json
from mmpack.schema.parquet import parse_text
from mmpack.schema.plain_json import check_json
from mmpack.schema.ragged import Ragged, RaggedSpec, TeachersSpec
from mmpack.schema.routes import RoutesSpec
from mmpack.schema.sample import Sample
from mmpack.schema.specs import Array, Str
from mmpack.schema.trace import MAX_RECORD_BYTES

RECORD, PIXELS, TEACHER = "record", "pixel_values", "teachers."
HELD = "array_columns"  # in the record: a container may lose a column that not all rows have
PARTS = ("offsets", "ids", "logprobs")  # of ragged lists


def to_columns(sample: Sample, where: str) -> dict[str, Any]:
    """The columns of a sample: `record` (text), arrays by field name, `pixel_values` {cache key: array or tensor}.

    `kept_ids` is two columns, `kept_ids.offsets` and `kept_ids.ids`; a teacher three, `teachers.NAME.offsets`, ….
    Absent fields have no column. Raises: TraceError for a field of the wrong type, ArgumentError for no Sample.
    """
    if not isinstance(sample, Sample):
        raise ArgumentError(f"{where} is {type(sample).__name__}. Fix: pass a list of Samples")
    faults: list[Any] = []
    checked = sample.checked(where, faults)
    if faults:
        raise faults[0]
    plain: dict[str, Any] = {}
    out: dict[str, Any] = {RECORD: ""}
    for name in Sample.columns():
        value = getattr(checked, name)
        if value is None:
            continue
        arrays = field_columns(name, value)
        out |= arrays
        if not arrays:
            plain[name] = plain_value(name, value, where)
    held = {m.cache_key: m.pixel_values for m in checked.media if m.pixel_values is not None}
    out[PIXELS] = {key: held_pixels(pixels, sample.family) for key, pixels in held.items()}
    out[RECORD] = dump_json({HELD: [name for name in out if name != RECORD], **plain})
    return out


def from_columns(columns: Mapping[str, Any], where: str) -> Sample:
    """The sample of `to_columns`, as a trace's record is read; arrays are numpy. A column of a field's name stands in
    for what the record has of it. Columns that are no field's are not read. Raises: TraceError.
    """
    if not isinstance(columns.get(RECORD), str):
        raise trace_error(f"{where}.{RECORD}", "is missing, the text of a sample", "MM004")
    record = parse_text(columns[RECORD], MAX_RECORD_BYTES, f"{where}.{RECORD}")
    if not isinstance(record, dict):
        raise trace_error(f"{where}.{RECORD}", "is not an object")
    lost = [name for name in record.pop(HELD, ()) if columns.get(name) is None]
    if lost:
        raise trace_error(f"{where}.{lost[0]}", "is missing, which its record names", "MM004")
    teachers: dict[str, dict[str, Any]] = {}
    for column, value in columns.items():
        name, _, part = column.rpartition(".")
        if value is None or column == RECORD:
            continue
        if name.startswith(TEACHER) and part in PARTS:
            teachers.setdefault(name.removeprefix(TEACHER), {})[part] = value
        elif name == "kept_ids" and part in PARTS:
            record.setdefault(name, {})[part] = value
        elif column in Sample.columns():
            text = isinstance(value, str) and not isinstance(Sample.columns()[column].spec, Str)
            at = f"{where}.{column}"
            record[column] = parse_text(value, MAX_RECORD_BYTES, at) if text else value
    if teachers:
        record["teachers"] = teachers
    sample = Sample.from_dict(record, where)
    pixels = columns.get(PIXELS) or {}
    for medium in sample.media:
        medium.pixel_values = given_pixels(pixels.get(medium.cache_key), sample.family)
    return sample


def held_pixels(pixels: Any, family: str) -> Any:
    """Pixels as a container holds them: [patches, patch_dim]; with channels last [patches, h · w, 3].

    So they are told from Gemma 4's of mmpack 0.2 and older, [patches, patch_dim] with channels first.
    """
    return pixels.reshape(len(pixels), -1, 3) if _channels_last(family) else pixels


def given_pixels(pixels: Any, family: str) -> Any:
    """`held_pixels` backwards; what an older mmpack wrote is turned."""
    if pixels is None or not _channels_last(family):
        return pixels
    if pixels.ndim == 2:
        pixels = pixels.reshape(len(pixels), 3, -1).swapaxes(1, 2)
    return pixels.reshape(len(pixels), -1)


def _channels_last(family: str) -> bool:
    return family in FAMILIES and FAMILIES[family].pixel_layout == "padded"


def is_array(name: str) -> bool:
    """Whether a field of Sample is held as arrays."""
    spec = Sample.columns()[name].spec
    return isinstance(spec, Array | RaggedSpec | TeachersSpec | RoutesSpec)


def plain_value(name: str, value: Any, where: str) -> Any:
    """A field that is no array, as JSON has it. Raises: TraceError."""
    written = Sample.columns()[name].spec.write(value, False)
    check_json(written, f"{where}.{name}")
    return written


def field_columns(name: str, value: Any) -> dict[str, np.ndarray]:
    """The columns of a field that is held as arrays; none for others."""
    if isinstance(value, Ragged):
        arrays = {part: getattr(value, part) for part in PARTS}
        return {f"{name}.{part}": array for part, array in arrays.items() if array is not None}
    if name == "teachers":
        return {
            column: array
            for teacher, lists in value.items()
            for column, array in field_columns(f"{TEACHER}{teacher}", lists).items()
        }
    return {name: value} if is_array(name) else {}
