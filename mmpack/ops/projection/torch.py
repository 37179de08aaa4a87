"""project_and_merge and its backward in plain PyTorch, on anything.

Products go through chunks of a fixed number of rows, the last one filled up with zeros: a row's bits don't depend on
how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.logprobs.softmax import pad_columns
from mmpack.ops.projection.project import Projection
from mmpack.ops.rows.torch import sum_rows

CHUNK_ROWS_CPU = 64
CHUNK_ROWS_GPU = 1024


def project_and_merge(
    embeddings: Tensor, layers: Sequence[Projection], vision: VisionRows
) -> list[Tensor]:
    """[T, H] -> [T, H] and, for each layer but the first, [V, H]."""
    dtype = embeddings.dtype
    first, *levels = (_projected(layer).to(dtype) for layer in layers)
    seen = first.index_select(0, vision.features)
    merged = embeddings.index_copy(0, vision.rows.long(), seen)
    return [merged, *(level.index_select(0, vision.features) for level in levels)]


def unproject(
    grads: Sequence[Tensor], layers: Sequence[Projection], vision: VisionRows, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of embeddings and of each layer's inputs, weight and bias; None where `needs` says so."""
    made: list[Tensor | None] = [None]
    if needs[0]:
        made = [grads[0].masked_fill((vision.source >= 0)[:, None], 0)]
    for i, (grad, layer) in enumerate(zip(grads, layers, strict=True)):
        need = needs[1 + 3 * i : 4 + 3 * i]
        if not any(need):
            made += [None] * 3
            continue
        values = grad.index_select(0, vision.rows) if i == 0 else grad
        features = sum_rows(values, vision.features, vision.inverse, len(layer.inputs))
        made += _layer_gradients(features.to(layer.inputs.dtype), layer, need)
    return made


def _layer_gradients(grad: Tensor, layer: Projection, need: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of inputs, weight and bias from that of the features [P, H]."""
    total = _product_dtype(grad)
    out: list[Tensor | None] = [None] * 3
    with torch.autocast(grad.device.type, enabled=False):
        if need[0]:
            out[0] = _product(grad, layer.weight)
        if need[1]:
            out[1] = (grad.T.to(total) @ layer.inputs.to(total)).to(grad.dtype)
        if need[2]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            out[2] = grad.sum(0, dtype=wide).to(grad.dtype)
    return out


def _projected(layer: Projection) -> Tensor:
    with torch.autocast(layer.inputs.device.type, enabled=False):
        return _product(layer.inputs, layer.weight.T, layer.bias)


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [P, K] · matrix [K, H] + bias, summed in float32 or better and rounded once."""
    chunk_rows = CHUNK_ROWS_CPU if rows.device.type == "cpu" else CHUNK_ROWS_GPU
    total, columns = _product_dtype(rows), matrix.shape[1]
    # With fewer than 12 columns MKL sums a row by its place among the others.
    padding = 0, pad_columns(columns)
    matrix = pad(matrix.to(total), padding)
    addend = matrix.new_zeros(matrix.shape[1]) if bias is None else pad(bias.to(total), padding)
    out = rows.new_empty(len(rows), columns)
    for start in range(0, len(rows), chunk_rows):
        chunk = rows[start : start + chunk_rows].to(total)
        full = pad(chunk, (0, 0, 0, chunk_rows - len(chunk)))
        made = torch.addmm(addend, full, matrix)
        out[start : start + chunk_rows] = made[: len(chunk), :columns]
    return out


def _product_dtype(x: Tensor) -> torch.dtype:
    """What factors are cast to: a GPU's products of halves are summed in float32 as they are."""
    if x.device.type != "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)
