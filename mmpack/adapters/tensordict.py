"""tensordict: samples and packed batches as TensorDicts, and back, equal bit for bit.

Memory is shared where the container allows it: see `to_tensordict`.

Run with tensordict 0.15.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mmpack.errors import ArgumentError, needs

with needs("tensordict", __name__):
    import torch
    from tensordict import (
        LazyStackedTensorDict,
        NonTensorData,
        NonTensorStack,
        TensorDict,
        TensorDictBase,
    )

from mmpack.adapters.checks import check_kind
from mmpack.adapters.sample_columns import PIXELS, from_columns, to_columns
from mmpack.packing.batch import PackedBatch
from mmpack.packing.tensors import as_tensor
from mmpack.schema.sample import Sample, as_samples

BATCH = "packed_batch"  # the entry of a batch's fields that are not tensors
_KEYS = ("sample_id", "group_id")
_DEVICE = "device of these"


def to_tensordict(given: Sequence[Sample] | PackedBatch, jagged: bool = False) -> Any:
    """A TensorDict of samples, batch size [B], or of a batch, batch size [].

    Of samples: arrays under their fields' names (`kept_ids.ids`, `teachers.NAME.ids`, … for ragged lists), pixels under
    ("pixel_values", cache key), `sample_id` and `group_id`, and all other fields as JSON text in `record`.

    Args:
        jagged: False: a lazy stack of one TensorDict per sample, whose tensors share the arrays' and pixels' memory.
            True: a TensorDict of columns, as TransferQueue and verl hold them: nested tensors (jagged) [B, n, …], one
            copy of each array, or a stack of tensors and None where some samples lack the field. `position_ids` are
            [B, L, rows]. Pixels are a stack of dicts {cache key: tensor} that share memory.

    Of a batch: its tensors share memory, columns under ("loss_columns", name) and ("token_columns", name); layouts and
    lists are one entry, `packed_batch`, that is no tensor.

    Raises: ArgumentError, TraceError.
    """
    if isinstance(given, PackedBatch):
        return _of_batch(given)
    samples = as_samples(given, "to_tensordict")
    rows = [
        to_columns(s, f"to_tensordict: samples[{i}]") | {name: getattr(s, name) for name in _KEYS}
        for i, s in enumerate(samples)
    ]
    if jagged:
        return _columns_of(rows)
    stacked = [TensorDict({k: _leaf(v) for k, v in row.items()}, batch_size=[]) for row in rows]
    return LazyStackedTensorDict(*stacked) if rows else TensorDict({}, batch_size=[0])


def from_tensordict(given: Any) -> Any:
    """The samples, or the batch, of a TensorDict that `to_tensordict` made; arrays and pixels are views.

    Columns of a field's name that were added or changed count; others (such as `advantages`) stay in the TensorDict.
    A batch has the tensors that the TensorDict has now, on its device. Raises: ArgumentError, TraceError.
    """
    fix = "pass a TensorDict that to_tensordict made"
    check_kind("from_tensordict: this", given, TensorDictBase, fix)
    if BATCH in _names(given):
        return _to_batch(given)
    if len(given.batch_size) != 1:
        raise ArgumentError(
            f"from_tensordict: batch size {list(given.batch_size)}, expected [B]. "
            "Fix: pass a TensorDict that to_tensordict made, or rows of one"
        )
    return [from_columns(r, f"from_tensordict: row {i}") for i, r in enumerate(rows_of(given))]


def rows_of(given: Any) -> list[dict[str, Any]]:
    """The columns of each row [B], tensors as numpy views; pixels as tensors."""
    if isinstance(given, LazyStackedTensorDict):
        return [{k: _value(k, row.get(k)) for k in _names(row)} for row in given.tensordicts]
    columns = {name: _entries(name, given.get(name)) for name in _names(given)}
    return [{name: of[i] for name, of in columns.items()} for i in range(given.batch_size[0])]


def _names(given: Any) -> list[str]:
    """Names of the entries: a TensorDict iterates over rows."""
    return list(given.keys())


def stacked_column(values: Sequence[Any]) -> Any:
    """One column [B] of arrays [n, …], tensors, texts, dicts or None: nested where all are arrays, else a stack."""
    tensors = [as_tensor(v) if hasattr(v, "dtype") else v for v in values]
    if all(isinstance(t, torch.Tensor) for t in tensors):
        kinds = {(t.dtype, t.ndim, t.shape[1:]) for t in tensors}
        if len(kinds) == 1 and tensors[0].ndim:
            return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return NonTensorStack(*(NonTensorData(t) for t in tensors))


def _columns_of(rows: list[dict[str, Any]]) -> Any:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name == PIXELS:
            values = [{key: as_tensor(p) for key, p in row[name].items()} for row in rows]
        columns[name] = stacked_column([turned(name, v) for v in values])
    return TensorDict(columns, batch_size=[len(rows)])


def turned(name: str, value: Any) -> Any:
    """Positions [rows, L] as [L, rows] and back: a nested tensor is ragged in its first dimension."""
    return value.T if name == "position_ids" and value is not None else value


def _leaf(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorDict({key: as_tensor(pixels) for key, pixels in value.items()}, batch_size=[])
    return as_tensor(value) if hasattr(value, "dtype") else NonTensorData(value)


def _value(name: str, value: Any) -> Any:
    """What `from_columns` reads, of an entry of one row."""
    if isinstance(value, NonTensorData):
        value = value.data
    if isinstance(value, TensorDictBase):
        return dict(value.items())
    if isinstance(value, torch.Tensor) and name != PIXELS:
        return value.detach().cpu().numpy()
    return value


def _entries(name: str, column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        parts = list(column.unbind())
    elif isinstance(column, NonTensorStack | NonTensorData):
        parts = column.tolist()
    else:
        parts = list(column)
    return [turned(name, _value(name, part)) for part in parts]


# ---- batches ---------------------------------------------------------------------------------------


def _of_batch(batch: PackedBatch) -> Any:
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {_DEVICE: batch.device}
    for f in dataclasses.fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, torch.Tensor):
            tensors[f.name] = value
        elif isinstance(value, dict) and value and all(map(torch.is_tensor, value.values())):
            tensors[f.name] = TensorDict(value, batch_size=[])
        else:
            others[f.name] = value
    return TensorDict(tensors | {BATCH: NonTensorData(others)}, batch_size=[], device=None)


def _to_batch(given: Any) -> PackedBatch:
    others = dict(_value(BATCH, given.get(BATCH)))
    known = {f.name for f in dataclasses.fields(PackedBatch)}
    for name in _names(given):
        value = given.get(name)
        if name in known:
            others[name] = dict(value.items()) if isinstance(value, TensorDictBase) else value
    device = others["input_ids"].device
    moved = {} if others.pop(_DEVICE) == device else others
    for name, value in moved.items():  # plans and lists, which a TensorDict does not move
        if dataclasses.is_dataclass(value) and hasattr(value, "to"):
            others[name] = value.to(device)
        elif isinstance(value, dict) and all(hasattr(v, "to") for v in value.values()):
            others[name] = {key: v.to(device) for key, v in value.items()}
    batch = PackedBatch(**others)
    batch.check_unchanged()
    return batch
