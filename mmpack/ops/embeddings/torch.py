"""merge_embeddings and its transpose in plain PyTorch, on anything."""

from __future__ import annotations

from torch import Tensor

from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.rows.torch import sum_rows


def merge_embeddings(
    embeddings: Tensor, features: Tensor, levels: list[Tensor], vision: VisionRows
) -> tuple[Tensor, list[Tensor]]:
    """[T, H], [P, H], L × [P, H] -> [T, H], L × [V, H]."""
    seen = features.index_select(0, vision.features)
    merged = embeddings.index_copy(0, vision.rows.long(), seen)
    return merged, [level.index_select(0, vision.features) for level in levels]


def unmerge_embeddings(
    grad: Tensor, grad_levels: list[Tensor], vision: VisionRows, num_tokens: int, num_features: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients [num_tokens, H], [num_features, H] and one of that per level; either number may be 0."""
    text = grad[:num_tokens].masked_fill((vision.source[:num_tokens] >= 0)[:, None], 0)
    if num_features == 0:
        none = [g.new_empty(0, g.shape[1]) for g in (grad, *grad_levels)]
        return text, none[0], none[1:]
    sums = [
        sum_rows(g, vision.features, vision.inverse, num_features)
        for g in (grad.index_select(0, vision.rows), *grad_levels)
    ]
    return text, sums[0], sums[1:]
