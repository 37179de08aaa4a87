"""`product` in plain torch: rows in chunks of a fixed number, so that the library gets one shape for any batch.

The last chunk is filled with zeros. Columns are padded to whole lanes: with fewer than 12 of them MKL sums a row by its
place among the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmpack.ops.logprobs.softmax import pad_columns

CHUNK_ROWS_CPU = 64
CHUNK_ROWS_GPU = 256


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] · b [K, N] + bias [N]."""
    (rows, depth), columns = a.shape, b.shape[1]
    dtype = torch.promote_types(a.dtype, torch.float32)
    if rows == 0 or columns == 0 or depth == 0:
        empty = a.new_zeros(rows, columns, dtype=out_dtype)
        return empty if bias is None else empty + bias.to(out_dtype)
    chunk = CHUNK_ROWS_CPU if a.device.type == "cpu" else CHUNK_ROWS_GPU
    whole = -(-rows // chunk) * chunk
    # Row-major for any layout of a: a library may take another kernel for another one.
    left = pad(a.to(dtype), (0, 0, 0, whole - rows)).contiguous()
    right = _right(b.to(dtype))
    out = left.new_empty(whole, right.shape[1])
    with torch.autocast(a.device.type, enabled=False):
        for first in range(0, whole, chunk):
            # `out`: another op of torch than mm, which `mmpack.invariant` puts this one in the place of
            torch.mm(left[first : first + chunk], right, out=out[first : first + chunk])
    out = out[:rows, :columns]
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(out_dtype).contiguous()


def batched(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [B, M, K] · b [B, K, N]."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=out_dtype)
    for i in range(len(a)):
        out[i] = product(a[i], b[i], None, out_dtype)
    return out


def _right(b: Tensor) -> Tensor:
    """b [K, N] with whole lanes of columns, in one of the two layouts that libraries know."""
    padding = pad_columns(b.shape[1])
    if padding:
        return pad(b, (0, padding)).contiguous()
    return b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous()
