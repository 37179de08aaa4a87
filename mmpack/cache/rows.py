"""RowStore: tensors [rows, …] side by side, for the KV of each layer; written and read at the same rows of all."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.scatter import scatter_rows

Rows = Tensor | np.ndarray


class RowStore:
    """`rows` rows of as many tensors as the first write has: keys and values of each layer that has KV of its own.

    Shapes, dtypes and device are those of the first write. Reads and writes copy bits. Threads may share a store, each
    at rows of its own. On a GPU they belong on one stream, which keeps them in order.

    Args: `rows`: `PrefixIndex.num_rows`. Raises: ArgumentError for what is no such number.

    Example:
        >>> import torch
        >>> from mmpack.cache import RowStore
        >>> store = RowStore(8)
        >>> keys, values = torch.ones(2, 1, 4), torch.zeros(2, 1, 4)
        >>> store.write(torch.tensor([5, 6]), [keys, values])
        >>> [t.tolist() for t in store.read(torch.tensor([6]))]
        [[[[1.0, 1.0, 1.0, 1.0]]], [[[0.0, 0.0, 0.0, 0.0]]]]
    """

    def __init__(self, rows: int):
        check_whole("RowStore", "rows", rows)
        self.rows = int(rows)
        self.tensors: list[Tensor] = []
        self._first = Lock()  # of two first writes one would be lost

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "tensors": self.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first = Lock()

    def __repr__(self) -> str:
        shapes = [list(t.shape[1:]) for t in self.tensors[:2]]
        return f"RowStore({self.rows} rows, {len(self.tensors)} tensors of {shapes} …)"

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row of all tensors; 0 before the first write."""
        return sum(t.nbytes for t in self.tensors) // self.rows

    def write(self, rows: Rows, tensors: Sequence[Tensor]) -> None:
        """Row k of each of `tensors` [K, …] to row rows[k]; int [K], without repeats.

        Raises: ArgumentError for another number of tensors, other shapes, dtypes or devices than the first write's, and
        for rows that are not there or repeat.
        """
        listed = isinstance(tensors, Sequence)
        if not listed or not len(tensors):
            raise ArgumentError(
                f"RowStore.write: tensors is {'empty' if listed else kind_of(tensors)}, expected a list of tensors. "
                "Fix: pass keys and values of each layer"
            )
        check_are_tensors("RowStore.write", **{f"tensors_{i}": t for i, t in enumerate(tensors)})
        if not all(t.ndim for t in tensors):
            raise ArgumentError("RowStore.write: a tensor is a single number. Fix: pass [K, …]")
        if len({t.device for t in tensors}) > 1:
            raise ArgumentError(
                "RowStore.write: tensors are on several devices. Fix: keep a store for the layers of each device"
            )
        index = self._index("write", rows, tensors[0].device)
        held = self.tensors or self._begun(tensors, len(index))
        self._check(held, tensors, len(index))
        with torch.no_grad():
            for store, tensor in zip(held, tensors, strict=True):
                scatter_rows(store, index, tensor.detach())

    def _check(self, held: list[Tensor], tensors: Sequence[Tensor], count: int) -> None:
        if len(tensors) != len(held):
            raise ArgumentError(
                f"RowStore.write: {len(tensors)} tensors, but the store has {len(held)}. "
                "Fix: pass keys and values of the same model"
            )
        for store, tensor in zip(held, tensors, strict=True):
            same = (tensor.dtype, tensor.device) == (store.dtype, store.device)
            if not same or tensor.shape != (count, *store.shape[1:]):
                raise ArgumentError(
                    f"RowStore.write: a tensor has shape {list(tensor.shape)}, {tensor.dtype} on "
                    f"{tensor.device}, but its store {list(store.shape)}, {store.dtype} on {store.device}, for "
                    f"{count} rows. "
                    "Fix: pass keys and values of the same model"
                )

    def read(self, rows: Rows) -> list[Tensor]:
        """[K, …] of each tensor. Raises: ArgumentError before the first write, and for rows that are not there."""
        if not self.tensors:
            raise ArgumentError("RowStore.read: nothing has been written yet. Fix: write first")
        index = self._index("read", rows, self.tensors[0].device)
        return [gather_rows(t, index) for t in self.tensors]

    def _begun(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        with self._first:
            if not self.tensors:
                made = self._made(tensors)
                self._check(made, tensors, count)
                self.tensors = made
            return self.tensors

    def _made(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # Of a first write in inference mode too: such tensors could not be written outside of it.
        try:
            with torch.inference_mode(False):
                return [
                    torch.empty(self.rows, *t.shape[1:], dtype=t.dtype, device=t.device)
                    for t in tensors
                ]
        except (RuntimeError, TypeError):  # of memory; of a number beyond int64
            size = sum(self.rows * t[:1].nbytes for t in tensors)
            raise ArgumentError(
                f"RowStore.write: {self.rows} rows take {size:,} bytes, more than {tensors[0].device} has. "
                "Fix: give the PrefixIndex a smaller budget"
            ) from None

    def _index(self, what: str, rows: Rows, device: torch.device) -> Tensor:
        """Rows of the host are checked; those of a device are not read."""
        if isinstance(rows, np.ndarray):
            if rows.ndim != 1 or rows.dtype.kind not in "iu":
                raise ArgumentError(
                    f"RowStore.{what}: rows have shape {list(rows.shape)} and dtype {rows.dtype}. "
                    "Fix: pass row numbers [K]"
                )
            rows = torch.from_numpy(rows.astype(np.int64))
        check_are_tensors(f"RowStore.{what}", rows=rows)
        if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"RowStore.{what}: rows have shape {list(rows.shape)} and dtype {rows.dtype}. Fix: pass row numbers [K]"
            )
        if rows.device.type == "cpu" and len(rows):
            low, high = (int(i) for i in rows.aminmax())
            if low < 0 or high >= self.rows:
                raise ArgumentError(
                    f"RowStore.{what}: rows run from {low} to {high}, but the store has {self.rows}. "
                    "Fix: pass the rows of its own PrefixIndex"
                )
            if what == "write" and len(rows.unique()) < len(rows):
                raise ArgumentError("RowStore.write: some rows repeat. Fix: write each row once")
        return rows.to(device, non_blocking=True)
