"""Vision rows into token embeddings: each distinct medium's features at every place where it occurs.

T rows, V of them vision rows, P features (the vision tokens of the distinct media, one medium after the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import by_backend, define_op, distinct_views, refuse_transforms
from mmpack.ops.embeddings import MERGE_EMBEDDINGS
from mmpack.ops.inputs import check_are_tensors, check_index, check_shapes
from mmpack.ops.records import Size
from mmpack.ops.rows.inverse import Inverse


class VisionRows(NamedTuple):
    """Where features go; int32. `PackedBatch.vision_rows` is made on the host when packing."""

    source: Tensor  # [T] the feature row of each packed row, -1 for text
    rows: Tensor  # [V] the packed rows that hold one, rising
    features: Tensor  # [V] their feature rows: source[rows]
    order: Tensor  # [V] places in `features` by feature row
    offsets: Tensor  # [P+1] feature row p is at order[offsets[p] : offsets[p + 1]]

    @property
    def inverse(self) -> Inverse:
        """Inverse of `features`, for `gather_rows`."""
        return Inverse(self.order, self.offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VisionRows:
        return VisionRows(*(part.to(device, non_blocking=non_blocking) for part in self))

    def pin_memory(self) -> VisionRows:
        return VisionRows(*(part.pin_memory() for part in self))


def merge_embeddings(
    embeddings: Tensor, features: Tensor, vision: VisionRows, levels: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Token embeddings with the features of the media at their placeholders; one launch, and one backward.

    Args:
        embeddings: [T, H].
        features: [P, H], all media of the batch in order (`PackedBatch.vision_token_offsets`).
        vision: `PackedBatch.vision_rows`.
        levels: deepstack features, each [P, H].

    Returns: the merged rows [T, H], and each level as [V, H], only the vision rows, as transformers' Qwen3-VL reads
    it (`deepstack_visual_embeds`; `visual_pos_masks` is `vision.source >= 0`). All in the dtype of `embeddings`.
    Embeddings of vision rows get a gradient of exactly 0; a feature gets the sum over its places, in row order,
    in float32 (float64 for float64), rounded once.

    Raises ArgumentError for shapes that don't fit each other.

    Example: a text token, then the two tokens of one image.
        >>> import torch
        >>> import mmpack as mp
        >>> from mmpack.ops.embeddings.merge import VisionRows
        >>> from mmpack.ops.rows.inverse import inverse_index
        >>> source, rows, index = torch.tensor([-1, 0, 1]), torch.tensor([1, 2]), torch.tensor([0, 1])
        >>> vision = VisionRows(source, rows, index, *inverse_index(index, 2))
        >>> features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> mp.merge_embeddings(torch.zeros(3, 2), features, vision)[0].tolist()
        [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    """
    _check_shapes(embeddings, features, vision, levels)
    refuse_transforms("merge_embeddings", embeddings, features, *levels)
    features = features.to(embeddings.dtype)
    levels = [level.to(embeddings.dtype) for level in levels]
    merged, *made = _Merge.apply(
        embeddings, *distinct_views(features), *distinct_views(*vision), *distinct_views(*levels)
    )
    return merged, made


def _check_shapes(
    embeddings: Tensor, features: Tensor, vision: VisionRows, levels: Sequence[Tensor]
) -> None:
    given = {"features": features, **{f"levels[{i}]": level for i, level in enumerate(levels)}}
    check_are_tensors("merge_embeddings", **given)
    check_rows("merge_embeddings", embeddings, vision)
    fix = "pass the vision tokens of all media of the batch, in its order"
    known = {"vision": (vision.offsets[1:], "P"), "embeddings": (embeddings, "T H")}
    shapes = {name: (x, "P H") for name, x in given.items()}
    check_shapes("merge_embeddings", fix, **known, **shapes)


def check_rows(what: str, embeddings: Tensor, vision: VisionRows) -> None:
    """Raise ArgumentError unless `embeddings` and `vision` fit each other."""
    if not isinstance(vision, VisionRows):
        raise ArgumentError(
            f"{what}: vision is {kind_of(vision)}, expected VisionRows. Fix: pass batch.vision_rows"
        )
    parts = {f"vision.{name}": x for name, x in vision._asdict().items()}
    check_are_tensors(what, embeddings=embeddings, **parts)
    fix = "pass one row for each of the batch's, without the batch dimension"
    shapes = {"vision.source": "T", "vision.rows": "V", "vision.features": "V", "vision.order": "V"}
    known = {name: (parts[name], shape) for name, shape in shapes.items()}
    check_shapes(what, fix, **known, embeddings=(embeddings, "T H"))
    for name, index in parts.items():
        check_index(what, name, index, device=embeddings.device)


def _merge(
    embeddings: Tensor, values: Tensor, levels: list[Tensor], vision: VisionRows
) -> tuple[Tensor, list[Tensor]]:
    check_index("merge_embeddings", "vision.source", vision.source, len(values), low=-1)
    check_index("merge_embeddings", "vision.features", vision.features, len(values))
    module = implementation(MERGE_EMBEDDINGS, embeddings.device)
    return module.merge_embeddings(embeddings, values, levels, vision)


def _merge_fake(
    embeddings: Tensor, values: Tensor, levels: list[Tensor], vision: VisionRows
) -> tuple[Tensor, list[Tensor]]:
    count = vision.rows.shape[0]
    merged = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
    return merged, [level.new_empty(count, level.shape[1]) for level in levels]


def _unmerge_fake(
    grad: Tensor,
    grad_levels: list[Tensor],
    vision: VisionRows,
    num_tokens: Size,
    num_features: Size,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    width = grad.shape[1]
    to_levels = [grad.new_empty(num_features, width) for _ in grad_levels]
    return grad.new_empty(num_tokens, width), grad.new_empty(num_features, width), to_levels


merge_op = define_op("merge_embeddings", _merge, _merge_fake)
# num_tokens or num_features is 0 where their gradient is not asked for
unmerge_op = define_op(
    "unmerge_embeddings", by_backend(MERGE_EMBEDDINGS, "unmerge_embeddings"), _unmerge_fake
)


class _Merge(torch.autograd.Function):
    """(merged, *levels) from embeddings, features, the parts of VisionRows, and levels; its transpose is _Unmerge."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, features: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        vision, levels = rest[:5], rest[5:]
        ctx.save_for_backward(*vision)
        merged, made = merge_op(embeddings, features, list(levels), *vision)
        return merged, *made

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_levels: Tensor) -> tuple[Tensor | None, ...]:
        vision = VisionRows(*ctx.saved_tensors)  # read once: checkpointing allows no more
        needs_embeddings, needs_features, *needs = ctx.needs_input_grad
        needs_levels = needs[5:]
        wanted = needs_features or any(needs_levels)
        num_tokens = vision.source.shape[0] if needs_embeddings else 0
        num_features = vision.offsets.shape[0] - 1 if wanted else 0
        to_embeddings, to_features, *to_levels = _Unmerge.apply(
            num_tokens, num_features, *distinct_views(grad), *vision, *distinct_views(*grad_levels)
        )
        return (
            to_embeddings if needs_embeddings else None,
            to_features if needs_features else None,
            *[None] * 5,
            *(g if needed else None for g, needed in zip(to_levels, needs_levels, strict=True)),
        )


class _Unmerge(torch.autograd.Function):
    """Gradients of embeddings, features and levels from how many rows of them are asked for, the gradient of what is
    merged, the parts of VisionRows, and the gradients of levels; its transpose is _Merge."""

    @staticmethod
    def forward(
        ctx: Any, num_tokens: int, num_features: int, grad: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        vision, levels = rest[:5], rest[5:]
        ctx.save_for_backward(*vision)
        ctx.counts = num_tokens, num_features
        text, features, made = unmerge_op(grad, list(levels), *vision, num_tokens, num_features)
        return text, features, *made

    @staticmethod
    def backward(
        ctx: Any, text: Tensor, features: Tensor, *levels: Tensor
    ) -> tuple[Tensor | None, ...]:
        vision = VisionRows(*ctx.saved_tensors)
        num_tokens, num_features = ctx.counts
        if num_tokens == 0:
            text = text.new_zeros(vision.source.shape[0], text.shape[1])
        if num_features == 0:
            zeros = features.new_zeros(vision.offsets.shape[0] - 1, features.shape[1])
            features, levels = zeros, tuple(zeros for _ in levels)
        merged, *made = _Merge.apply(
            text, *distinct_views(features), *vision, *distinct_views(*levels)
        )
        return None, None, merged, *[None] * 5, *made
