"""Rows of a tensor overwritten by an index, in place: what writes to a store that `gather_rows` reads."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.backend import implementation
from mmpack.ops.inputs import check_index, check_tensors
from mmpack.ops.rows import SCATTER_ROWS


def scatter_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """out[index] = values, bit for bit: out [R, …] contiguous, index [K] (int32 or int64) without repeats, [K, …].

    Without gradient. Raises ArgumentError for wrong shapes or dtypes, for a tensor that needs a gradient, for values
    that lie in the memory of out, and on the CPU for an index out of range. On a GPU the index is not read, because
    that would wait for the GPU.

    Example:
        >>> import torch
        >>> from mmpack.ops.rows.scatter import scatter_rows
        >>> store = torch.zeros(3, 2)
        >>> scatter_rows(store, torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> store.tolist()
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    """
    check_tensors("scatter_rows", (), out=out, index=index, values=values)
    check_index("scatter_rows", "index", index, device=out.device)
    if out.ndim == 0 or values.shape != (len(index), *out.shape[1:]) or values.dtype != out.dtype:
        raise ArgumentError(
            f"scatter_rows: values have shape {list(values.shape)} and dtype {values.dtype}, expected {len(index)} "
            f"rows of out {list(out.shape)} {out.dtype}. Fix: pass one row per index, in out's dtype"
        )
    if not out.is_contiguous():
        raise ArgumentError(
            "scatter_rows: out is not contiguous. Fix: pass a contiguous tensor, such as the whole store"
        )
    if torch.is_grad_enabled() and (out.requires_grad or values.requires_grad):
        raise ArgumentError(
            "scatter_rows: it has no gradient, but a tensor requires one. Fix: detach it, or use torch.no_grad()"
        )
    if not torch.compiler.is_compiling() and _overlap(out, values):
        raise ArgumentError(
            "scatter_rows: values share memory with out, so rows would be read while they are written. "
            "Fix: pass values.clone(), or use gather_rows"
        )
    check_index("scatter_rows", "index", index, len(out))
    implementation(SCATTER_ROWS, out.device).scatter_rows(out, index, values)


def _overlap(out: Tensor, values: Tensor) -> bool:
    """Whether the span of values, from its first to its last byte, meets that of out, which is contiguous."""
    if out.device.type == "meta" or not (out.numel() and values.numel()):
        return False
    steps = zip(values.shape, values.stride(), strict=True)
    span = (1 + sum((size - 1) * stride for size, stride in steps)) * values.element_size()
    start, first = out.data_ptr(), values.data_ptr()
    return first < start + out.nbytes and start < first + span
