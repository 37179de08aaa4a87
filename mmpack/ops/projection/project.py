"""The projector's last linear layer and `merge_embeddings` as one op: features [P, H] never exist by themselves.

T rows, V of them vision rows, P features (the vision tokens of the distinct media, one medium after the other), K
the width in front of the last layer, H the width of the text model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.attention.operands import attended_dtype
from mmpack.ops.backend import implementation
from mmpack.ops.custom_op import define_op, distinct_views
from mmpack.ops.embeddings.merge import VisionRows, check_rows
from mmpack.ops.inputs import check_floats, check_index, check_shapes, check_tensors
from mmpack.ops.projection import PROJECT_AND_MERGE


class Projection(NamedTuple):
    """A linear layer and what goes into it: features are inputs · weightᵀ + bias. All of one dtype."""

    inputs: Tensor  # [P, K]
    weight: Tensor  # [H, K]
    bias: Tensor | None = None  # [H]


def project_and_merge(
    embeddings: Tensor, projector: Projection, vision: VisionRows, levels: Sequence[Projection] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Token embeddings with the projector's product at the placeholders; the product's only copy is the result.

    `merge_embeddings` of `inputs · weightᵀ + bias`, forward and backward, without the features in between: the
    product is written to a feature's first row, and copied from there to its others. The backward gathers a feature's
    gradient from its rows straight in front of the two products.

    Args:
        embeddings: [T, H].
        projector: the last layer of the vision tower's projector and its inputs, all media of the batch in order
            (`PackedBatch.vision_token_offsets`).
        vision: `PackedBatch.vision_rows`.
        levels: the last layers of the deepstack levels, each with its own inputs [P, K] and weight [H, K].

    Returns: the merged rows [T, H], and each level as [V, H], only the vision rows, as transformers' Qwen3-VL reads
    it. All in the dtype of `embeddings`. Products are summed in float32 (float64 for float64) and rounded to the
    dtype of `inputs`; a row's bits depend on its own input and on the weights, not on what is packed with it.
    Embeddings of vision rows get a gradient of exactly 0. The gradient of a feature is the sum over its places, in
    row order, in float32; those of weight and bias are summed in float32 and rounded once. No atomics: the same
    bits every time. Autocast casts as for a linear layer. There is no second derivative.

    Raises ArgumentError for shapes, dtypes and devices that don't fit each other.

    Example: a text token, then the two tokens of one image.
        >>> import torch
        >>> import mmpack as mp
        >>> from mmpack.ops.embeddings.merge import VisionRows, check_rows
        >>> from mmpack.ops.rows.inverse import inverse_index
        >>> source, rows, index = torch.tensor([-1, 0, 1]), torch.tensor([1, 2]), torch.tensor([0, 1])
        >>> vision = VisionRows(source, rows, index, *inverse_index(index, 2))
        >>> projector = mp.ops.Projection(torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [100.0]]))
        >>> mp.ops.project_and_merge(torch.zeros(3, 2), projector, vision)[0].tolist()
        [[0.0, 0.0], [10.0, 100.0], [20.0, 200.0]]
    """
    if not isinstance(levels, Sequence):
        raise ArgumentError(
            f"project_and_merge: levels is {kind_of(levels)}, expected a list of Projection. Fix: pass [] for none"
        )
    given = {"projector": projector, **{f"levels[{i}]": p for i, p in enumerate(levels)}}
    _check(embeddings, given, vision)
    layers = [_as_autocast(p) for p in given.values()]
    run = _Project.apply(len(layers), *distinct_views(embeddings, *vision, *_flat(layers)))
    merged, *made = run
    return merged, made


def _check(embeddings: Tensor, given: dict[str, Projection], vision: VisionRows) -> None:
    what = "project_and_merge"
    parts: dict[str, Any] = {}
    for name, p in given.items():
        if not isinstance(p, Projection):
            raise ArgumentError(
                f"{what}: {name} is {kind_of(p)}. Fix: pass mp.ops.Projection(inputs, weight, bias)"
            )
        parts |= {f"{name}.{field}": x for field, x in zip(p._fields, p, strict=True)}
    biases = [name for name in parts if name.endswith(".bias")]
    check_tensors(what, biases, embeddings=embeddings, **parts)
    check_rows(what, embeddings, vision)
    check_floats(what, "embed the ids", embeddings=embeddings)
    for name, p in given.items():
        _check_layer(what, name, p, vision.offsets[1:], embeddings)


def _check_layer(what: str, name: str, p: Projection, features: Tensor, embeddings: Tensor) -> None:
    inputs, weight, bias = p
    shapes = {"inputs": (inputs, "P K"), "weight": (weight, "H K"), "bias": (bias, "H")}
    shapes = {f"{name}.{part}": given for part, given in shapes.items()}
    fix = "pass the projector's last linear layer, and what goes into it for all media of the batch"
    known = {"features": (features, "P"), "embeddings": (embeddings, "T H")}
    check_shapes(what, fix, **known, **shapes)
    dtypes = {x.dtype for x in _as_autocast(p) if x is not None}
    if len(dtypes) > 1 or not inputs.is_floating_point():
        raise ArgumentError(
            f"{what}: {name} has dtypes {', '.join(sorted(map(str, dtypes)))}, expected one of floating point. "
            "Fix: cast inputs to the dtype of the weight, or run under autocast"
        )


def _as_autocast(p: Projection) -> Projection:
    """In the dtype of autocast where that is on, as a linear layer is."""
    device = p.inputs.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return p
    inputs, weight, bias = (None if x is None else x.to(attended_dtype(x)) for x in p)
    assert inputs is not None and weight is not None
    return Projection(inputs, weight, bias)


def _flat(layers: Sequence[Projection]) -> list[Tensor | None]:
    return [x for layer in layers for x in layer]


class Layers(NamedTuple):
    """Projections as the ops' schemas have them."""

    inputs: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor | None]

    @property
    def each(self) -> list[Projection]:
        return [Projection(*p) for p in zip(*self, strict=True)]


def _columns(flat: Sequence[Any]) -> Layers:
    """Columns of three tensors per layer."""
    return Layers(list(flat[::3]), list(flat[1::3]), list(flat[2::3]))


def _project(embeddings: Tensor, layers: Layers, vision: VisionRows) -> list[Tensor]:
    count = len(layers.inputs[0])
    check_index("project_and_merge", "vision.source", vision.source, count, low=-1)
    check_index("project_and_merge", "vision.rows", vision.rows, len(embeddings))
    check_index("project_and_merge", "vision.features", vision.features, count)
    module = implementation(PROJECT_AND_MERGE, embeddings.device, layers.inputs[0].dtype)
    return module.project_and_merge(embeddings, layers.each, vision)


def _project_fake(embeddings: Tensor, layers: Layers, vision: VisionRows) -> list[Tensor]:
    merged = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
    size = vision.rows.shape[0], merged.shape[1]
    return [merged, *(merged.new_empty(size) for _ in layers.inputs[1:])]


def _unproject(
    grads: list[Tensor], layers: Layers, vision: VisionRows, needs: list[bool]
) -> list[Tensor]:
    """Gradients of embeddings, then of each layer's three; [0] for those that are not asked for."""
    module = implementation(PROJECT_AND_MERGE, grads[0].device, layers.inputs[0].dtype)
    made = module.unproject(grads, layers.each, vision, needs)
    return [grads[0].new_empty(0) if g is None else g for g in made]


def _unproject_fake(
    grads: list[Tensor], layers: Layers, vision: VisionRows, needs: list[bool]
) -> list[Tensor]:
    wanted = zip([grads[0], *(x for layer in layers.each for x in layer)], needs, strict=True)
    return [
        x.new_empty(x.shape) if need and x is not None else grads[0].new_empty(0)
        for x, need in wanted
    ]


project_op = define_op("project_and_merge", _project, _project_fake)
unproject_op = define_op("unproject", _unproject, _unproject_fake)


class _Project(torch.autograd.Function):
    """(merged, *levels) from how many layers, embeddings, the parts of VisionRows, and three tensors per layer."""

    @staticmethod
    def forward(
        ctx: Any, count: int, embeddings: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, ...]:
        vision, flat = rest[:5], rest[5:]
        ctx.save_for_backward(*vision, *flat)
        return tuple(project_op(embeddings, *_columns(flat), *vision))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        vision, flat = saved[:5], saved[5:]
        needs = [ctx.needs_input_grad[1], *ctx.needs_input_grad[7:]]
        made = unproject_op(list(grads), *_columns(flat), *vision, needs)
        first, *others = (g if need else None for g, need in zip(made, needs, strict=True))
        return None, first, *[None] * 5, *others
