"""The product of a projector's last layer on Triton, stored at rows of the pack; and its backward.

A feature's product is stored at the first of its rows. `fill_kernel` then writes the other rows of the pack: text from
the embeddings, and a feature's further rows from its first. Going back, the gradients of the features are gathered a
chunk of rows at a time, for both products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.embeddings.triton import unmerge_embeddings
from mmpack.ops.logprobs.linear.product_kernels import halves
from mmpack.ops.logprobs.linear.tiles import (
    aligned,
    place,
    programs_of,
    shape_arguments,
    tiles_of,
)
from mmpack.ops.products.triton import tile_product
from mmpack.ops.projection.project import Projection
from mmpack.ops.rows.inverse import Inverse
from mmpack.ops.rows.triton import as_words, sum_rows, tile, tiling

GATHERED_ROWS = 32_768  # of gradients of features that exist at a time


class Places(NamedTuple):
    """Where the product of each feature is stored; int32 [P], -1 for a feature that is nowhere."""

    first: Tensor  # of the vision rows, [V]
    row: Tensor  # of the packed rows, [T]


def project_and_merge(
    embeddings: Tensor, layers: Sequence[Projection], vision: VisionRows
) -> list[Tensor]:
    """[T, H] -> [T, H] and, for each layer but the first, [V, H]."""
    count, width = len(vision.rows), embeddings.shape[1]
    merged = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
    taken = [merged.new_empty(count, width) for _ in layers[1:]]
    if count == 0 or width == 0:
        return [merged.copy_(embeddings), *taken]
    places, source = _places(vision), vision.source.contiguous()
    index = vision.features.contiguous()
    with torch.cuda.device_of(embeddings):
        project(layers[0], places.row, merged)
        _fill(embeddings, source, places.row, merged)
        for layer, out in zip(layers[1:], taken, strict=True):
            project(layer, places.first, out)
            _fill(out, index, places.first, out)
    return [merged, *taken]


def unproject(
    grads: Sequence[Tensor], layers: Sequence[Projection], vision: VisionRows, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of embeddings and of each layer's inputs, weight and bias; None where `needs` says so."""
    made: list[Tensor | None] = [None]
    if needs[0]:
        made = [unmerge_embeddings(grads[0], [], vision, len(grads[0]), 0)[0]]
    order = vision.order.contiguous()
    rows = vision.rows.index_select(0, order)
    with torch.cuda.device_of(grads[0]):
        for i, (grad, layer) in enumerate(zip(grads, layers, strict=True)):
            entries = Inverse(rows if i == 0 else order, vision.offsets)
            made += _layer_gradients(
                grad.contiguous(), entries, layer, needs[1 + 3 * i : 4 + 3 * i]
            )
    return made


def project(layer: Projection, target: Tensor | None, out: Tensor) -> None:
    """out[target[p]] = inputs[p] · weightᵀ + bias where target [P] is not negative; None: each row at its own place.

    out [·, H] is contiguous; what no target names stays.
    """
    _product(layer.inputs, layer.weight, layer.bias, target, out, by_depth=False)


def _product(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    out: Tensor,
    by_depth: bool,
) -> None:
    """`by_depth`: weight is [K, H], not [H, K]."""
    if out.numel() == 0 or len(inputs) == 0:
        return
    tiles, grid = tiles_of(inputs.device), programs_of(inputs.device)
    block = [tiles.depth, tiles.columns] if by_depth else [tiles.columns, tiles.depth]
    if inputs.shape[1] == 0:  # a sum of nothing; a tensor without columns has no descriptor
        inputs, weight = inputs.new_zeros(len(inputs), 8), weight.new_zeros(out.shape[1], 8)
        block, by_depth = [tiles.columns, tiles.depth], False
    project_kernel[(grid,)](
        TensorDescriptor.from_tensor(aligned(inputs), [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(aligned(weight), block),
        bias,
        target,
        out,
        len(inputs),
        out.shape[1],
        inputs.shape[1],
        BY_DEPTH=by_depth,
        PROGRAMS=grid,
        **shape_arguments(tiles),
    )


def _layer_gradients(
    grad: Tensor, entries: Inverse, layer: Projection, need: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of inputs, weight and bias; that of feature p is the sum of grad at the entries of p."""
    inputs, weight, bias = layer
    if not any(need):
        return [None] * 3
    count, (width, depth) = len(inputs), weight.shape
    to_inputs = inputs.new_empty(count, depth) if need[0] else None
    to_weight: Tensor | None = None
    to_bias = weight.new_zeros(width, dtype=torch.float32) if need[2] else None
    for start in range(0, count, GATHERED_ROWS):
        stop = min(start + GATHERED_ROWS, count)
        own = Inverse(entries.order, entries.offsets[start : stop + 1])
        features = sum_rows(grad, own.order, own, stop - start).to(inputs.dtype)
        if to_inputs is not None:
            _product(features, weight, None, None, to_inputs[start:stop], by_depth=True)
        if need[1]:
            to_weight = _added_product(to_weight, features.T, inputs[start:stop])
        if to_bias is not None:
            to_bias += features.sum(0, dtype=torch.float32)
        del features  # before the next are made
    if need[1] and to_weight is None:
        to_weight = torch.zeros_like(weight)
    return [
        to_inputs,
        None if to_weight is None else to_weight.to(weight.dtype),
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
    ]


def _added_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total float32 + a · b, by cuBLAS, in the place of total."""
    with torch.autocast(a.device.type, enabled=False):
        if not a.is_cuda:
            product = a.float() @ b.float()
            return product if total is None else total.add_(product)
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _places(vision: VisionRows) -> Places:
    offsets = vision.offsets
    here = offsets[1:] > offsets[:-1]
    begin = torch.where(here, offsets[:-1], 0)
    first = torch.where(here, vision.order.index_select(0, begin), -1)
    row = torch.where(here, vision.rows.index_select(0, first.clamp(min=0)), -1)
    return Places(first.int(), row.int())


def _fill(embeddings: Tensor, source: Tensor, target: Tensor, merged: Tensor) -> None:
    """Rows of merged that are not a feature's first: text (source -1) and repeated features."""
    (text, words), units, unit = as_words(embeddings, merged)
    shape = tiling(len(merged), units * unit, words.element_size())
    fill_kernel[shape.grid](
        text, source, target, words, len(merged), units, UNIT=unit, **shape.blocks
    )


# Counts differ from pack to pack: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["count"])
def project_kernel(
    x_desc,  # [ROWS, DEPTH]
    weight_desc,  # [COLUMNS, DEPTH], or [DEPTH, COLUMNS] with BY_DEPTH
    bias_ptr,
    target_ptr,
    out_ptr,
    count,
    width,
    depth,
    BY_DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A persistent product, K in one fixed order; each row of a tile is stored at its target."""
    tiles_m, tiles_n = tl.cdiv(count, ROWS), tl.cdiv(width, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = place(number, tiles_m, tiles_n, GROUP)
        total = tile_product(
            x_desc, weight_desc, m, n, steps, False, BY_DEPTH, ROWS, COLUMNS, DEPTH
        )
        rows = m * ROWS + tl.arange(0, ROWS)
        if target_ptr is not None:
            target = tl.load(target_ptr + rows, mask=rows < count, other=-1)
        else:
            target = tl.where(rows < count, rows, -1)
        left, right = halves(total, ROWS, COLUMNS)
        at_left = n * COLUMNS + tl.arange(0, COLUMNS // 2)
        at_right = at_left + COLUMNS // 2
        store_half(left, bias_ptr, target, at_left, out_ptr, width, x_desc.dtype)
        store_half(right, bias_ptr, target, at_right, out_ptr, width, x_desc.dtype)


@triton.jit
def store_half(values, bias_ptr, target, columns, out_ptr, width, ROUNDED: tl.constexpr):
    """out[target, columns] = values + bias, rounded to the dtype of the product and then to that of out."""
    inside = columns < width
    if bias_ptr is not None:
        values += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    where = target.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (target >= 0)[:, None] & inside[None, :]
    tl.store(out_ptr + where, values.to(ROUNDED).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def fill_kernel(
    text,
    source,
    target,
    out,
    count,
    units,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out[t] = text[t] where source[t] is -1, out[target[source[t]]] where that is another row; else it stays."""
    width = units * UNIT  # so that the compiler sees that rows are aligned
    rows, columns = tile(tl.program_id(0), width, BLOCK_ROWS, BLOCK_COLS)
    feature = tl.load(source + rows, mask=rows < count, other=0)
    is_text = (rows < count) & (feature < 0)
    first = tl.load(target + feature, mask=(rows < count) & (feature >= 0), other=0)
    again = (rows < count) & (feature >= 0) & (first != rows)
    inside = (columns < width)[None, :]
    here = rows.to(tl.int64)[:, None] * width + columns[None, :]
    there = first.to(tl.int64)[:, None] * width + columns[None, :]
    own = tl.load(text + here, mask=is_text[:, None] & inside, other=0)
    twin = tl.load(out + there, mask=again[:, None] & inside, other=0)
    values = tl.where(is_text[:, None], own, twin)
    tl.store(out + here, values, mask=(is_text | again)[:, None] & inside, cache_modifier=".cs")
