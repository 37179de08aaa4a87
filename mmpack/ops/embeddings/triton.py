"""Vision rows written into token embeddings, with all deepstack levels: one launch forward, one backward.

A program has a tile of the rows of tokens or of one level; tiles, copies and sums are those of gather_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.rows.triton import aligned, as_words, copy_tile, sum_tile, sum_type, tile, tiling


# Counts differ from pack to pack: no kernel of their own for those that 16 divides.
@triton.jit(do_not_specialize=["num_tokens", "num_vision"])
def merge_kernel(
    embeddings,
    features,
    levels,
    source,
    index,
    merged,
    taken,
    num_tokens,
    num_vision,
    units,
    UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """merged[t] = features[source[t]], or embeddings[t] where that is -1; taken[l][v] = levels[l][index[v]]."""
    width = units * UNIT
    across = tl.cdiv(width, BLOCK_COLS)
    part = tl.program_id(0)
    of_tokens = tl.cdiv(num_tokens, BLOCK_ROWS) * across
    if part < of_tokens:
        rows, columns = tile(part, width, BLOCK_ROWS, BLOCK_COLS)
        live = rows < num_tokens
        feature = tl.load(source + rows, mask=live, other=-1)
        seen = feature >= 0
        inside = (columns < width)[None, :]
        here = rows.to(tl.int64)[:, None] * width + columns[None, :]
        there = feature.to(tl.int64)[:, None] * width + columns[None, :]
        text = tl.load(
            embeddings + here,
            mask=(live & (feature < 0))[:, None] & inside,
            other=0,
            eviction_policy="evict_first",  # the features are read again
        )
        vision = tl.load(features + there, mask=seen[:, None] & inside, other=0)
        values = tl.where(seen[:, None], vision, text)
        tl.store(merged + here, values, mask=live[:, None] & inside, cache_modifier=".cs")
    else:
        of_level = tl.cdiv(num_vision, BLOCK_ROWS) * across
        rows, columns = tile((part - of_tokens) % of_level, width, BLOCK_ROWS, BLOCK_COLS)
        live = rows < num_vision
        read = tl.load(index + rows, mask=live, other=0)
        for level in tl.static_range(LEVELS):
            if (part - of_tokens) // of_level == level:
                copy_tile(levels[level], read, taken[level], rows, columns, width, live)


@triton.jit(do_not_specialize=["num_tokens", "num_features"])
def unmerge_kernel(
    grad,
    grad_levels,
    source,
    vision,
    order,
    offsets,
    to_embeddings,
    to_features,
    to_levels,
    num_tokens,
    num_features,
    units,
    UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Gradients: the text rows' own, 0 at vision rows; of each feature the sum over its places in `order`."""
    width = units * UNIT
    across = tl.cdiv(width, BLOCK_COLS)
    part = tl.program_id(0)
    of_level = tl.cdiv(num_features, BLOCK_ROWS) * across
    of_features = (1 + LEVELS) * of_level
    if part >= of_features:  # the long programs start first
        rows, columns = tile(part - of_features, width, BLOCK_ROWS, BLOCK_COLS)
        live = rows < num_tokens
        feature = tl.load(source + rows, mask=live, other=0)
        inside = (columns < width)[None, :]
        here = rows.to(tl.int64)[:, None] * width + columns[None, :]
        values = tl.load(
            grad + here,
            mask=(feature < 0)[:, None] & inside,
            other=0.0,
            eviction_policy="evict_first",
        )
        tl.store(to_embeddings + here, values, mask=live[:, None] & inside, cache_modifier=".cs")
    else:
        rows, columns = tile(part % of_level, width, BLOCK_ROWS, BLOCK_COLS)
        if part < of_level:
            sum_tile(
                grad, vision, order, offsets, to_features, rows, num_features, columns, width, SUM
            )
        for level in tl.static_range(LEVELS):
            if part // of_level == level + 1:
                part_grad, to = grad_levels[level], to_levels[level]
                sum_tile(
                    part_grad, None, order, offsets, to, rows, num_features, columns, width, SUM
                )


def merge_embeddings(
    embeddings: Tensor, features: Tensor, levels: list[Tensor], vision: VisionRows
) -> tuple[Tensor, list[Tensor]]:
    """[T, H], [P, H], L × [P, H] -> [T, H], L × [V, H]."""
    source, index = vision.source.contiguous(), vision.features.contiguous()
    merged = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
    taken = [level.new_empty(index.shape[0], level.shape[1]) for level in levels]
    if merged.numel() == 0:
        return merged, taken
    words, units, unit = as_words(embeddings, features, merged, *levels, *taken)
    shape = tiling(len(merged), units * unit, words[0].element_size())
    one_level = tiling(index.shape[0], units * unit, words[0].element_size()).programs
    text, seen, out, *others = words
    read, written = tuple(others[: len(levels)]), tuple(others[len(levels) :])
    with torch.cuda.device_of(embeddings):
        merge_kernel[(shape.programs + len(levels) * one_level,)](
            text, seen, read, source, index, out, written, len(merged), index.shape[0], units,
            UNIT=unit, LEVELS=len(levels), **shape.blocks,
        )  # fmt: skip
    return merged, taken


def unmerge_embeddings(
    grad: Tensor, grad_levels: list[Tensor], vision: VisionRows, num_tokens: int, num_features: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients [num_tokens, H], [num_features, H] and one of that per level; either number may be 0."""
    source, rows, order, offsets = (
        index.contiguous() for index in (vision.source, vision.rows, *vision.inverse)
    )
    to_embeddings = grad.new_empty(num_tokens, grad.shape[1])
    to_features = grad.new_empty(num_features, grad.shape[1])
    to_levels = [torch.empty_like(to_features) for _ in grad_levels]
    outputs = [to_embeddings, to_features, *to_levels]
    (flat, *others), units, unit = aligned(grad, *grad_levels, *outputs)
    levels = len(grad_levels)
    read, (text, features, *written) = tuple(others[:levels]), others[levels:]
    shape = tiling(num_tokens, units * unit, grad.element_size())
    one_level = tiling(num_features, units * unit, grad.element_size()).programs
    if grid := shape.programs + (1 + levels) * one_level:
        with torch.cuda.device_of(grad):
            unmerge_kernel[(grid,)](
                flat, read, source, rows, order, offsets, text, features, tuple(written),
                num_tokens, num_features, units,
                UNIT=unit, LEVELS=levels, SUM=sum_type(grad.dtype), **shape.blocks,
            )  # fmt: skip
    return to_embeddings, to_features, to_levels
