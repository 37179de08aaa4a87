"""merge_embeddings and its transpose in plain PyTorch, on anything."""

from __future__ import annotations

from torch import Tensor

from mmpack.ops.rows.inverse import Inverse
from mmpack.ops.rows.torch import sum_rows


def merge_embeddings(
    embeddings: Tensor,
    features: Tensor,
    levels: list[Tensor],
    source: Tensor,
    rows: Tensor,
    index: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """[T, H], [P, H], L × [P, H], source [T], rows [V], index [V] -> [T, H], L × [V, H]."""
    merged = embeddings.index_copy(0, rows.long(), features.index_select(0, index))
    return merged, [level.index_select(0, index) for level in levels]


def unmerge_embeddings(
    grad: Tensor,
    grad_levels: list[Tensor],
    source: Tensor,
    rows: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    num_tokens: int,
    num_features: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients [num_tokens, H], [num_features, H] and one of that per level; either number may be 0."""
    text = grad[:num_tokens].masked_fill((source[:num_tokens] >= 0)[:, None], 0)
    if num_features == 0:
        none = [g.new_empty(0, g.shape[1]) for g in (grad, *grad_levels)]
        return text, none[0], none[1:]
    inverse = Inverse(order, offsets)
    sums = [
        sum_rows(g, index, inverse, num_features)
        for g in (grad.index_select(0, rows), *grad_levels)
    ]
    return text, sums[0], sums[1:]
