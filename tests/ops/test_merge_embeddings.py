"""merge_embeddings on the torch path: transformers' masked_scatter forward, float64 autograd of it backward."""

import pytest
import torch
from support.gathers import merged_as_transformers_does, some_vision, summed_in_order

import mmpack as mp
from mmpack.ops.embeddings.merge import merge_embeddings

CPU = torch.device("cpu")


def drawn(rows, width, dtype=torch.float32):
    return torch.randn(rows, width).to(dtype).requires_grad_()


@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(levels, dtype):
    vision = some_vision(CPU, [3, 4, 2], [0, 1, 0, 0, 2, 1], gap=2, tail=5)
    embeddings, features = drawn(len(vision.source), 8, dtype), drawn(9, 8, dtype)
    deep = [drawn(9, 8, dtype) for _ in range(levels)]
    merged, taken = merge_embeddings(embeddings, features, vision, deep)
    expected, expected_taken = merged_as_transformers_does(embeddings, features, vision, deep)
    assert torch.equal(merged, expected) and len(taken) == levels
    assert all(torch.equal(a, b) for a, b in zip(taken, expected_taken, strict=True))

    weights = [torch.randn_like(x) for x in (merged, *taken)]
    grads = torch.autograd.grad([merged, *taken], [embeddings, features, *deep], weights)
    kept = torch.where((vision.source < 0)[:, None], weights[0], 0)
    assert torch.equal(grads[0], kept)
    weights[0] = weights[0][vision.rows.long()]
    for grad, weight in zip(grads[1:], weights, strict=True):
        assert torch.equal(grad, summed_in_order(weight, vision.features, 9))


def test_gradients_by_differences():
    vision = some_vision(CPU, [2, 1], [0, 1, 0], gap=1)
    inputs = [drawn(n, 2, torch.float64) for n in (len(vision.source), 3, 3)]
    assert torch.autograd.gradcheck(
        lambda e, f, d: [
            y
            for x in merge_embeddings(e, f, vision, [d])
            for y in ([x] if torch.is_tensor(x) else x)
        ],
        inputs,
    )


def test_nan_at_vision_rows_stays_out_of_the_embeddings():
    vision = some_vision(CPU, [3], [0, 0], gap=1)
    embeddings = torch.where((vision.source < 0)[:, None], torch.ones(8, 4), torch.nan)
    embeddings.requires_grad_()
    merged, _ = merge_embeddings(embeddings, torch.zeros(3, 4), vision)
    assert merged.isfinite().all()
    weight = torch.where((vision.source < 0)[:, None], torch.ones(8, 4), torch.nan)
    (grad,) = torch.autograd.grad(merged, embeddings, weight)
    assert torch.equal(grad, (vision.source < 0)[:, None] * torch.ones(8, 4))


@pytest.mark.parametrize("frozen", ["embeddings", "features"])
def test_what_is_frozen_has_no_gradient(frozen):
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    parts = {"embeddings": drawn(len(vision.source), 4), "features": drawn(7, 4)}
    parts[frozen].requires_grad_(False)
    merged, _ = merge_embeddings(parts["embeddings"], parts["features"], vision)
    merged.sum().backward()
    for name, x in parts.items():
        assert (x.grad is None) == (name == frozen)


def test_text_alone():
    vision = some_vision(CPU, [], [], gap=0, tail=5)
    embeddings = drawn(5, 4)
    merged, taken = merge_embeddings(embeddings, torch.zeros(0, 4), vision, [torch.zeros(0, 4)])
    assert torch.equal(merged, embeddings) and taken[0].shape == (0, 4)
    merged.sum().backward()
    assert torch.equal(embeddings.grad, torch.ones(5, 4))


def test_features_take_the_dtype_of_the_embeddings():
    vision = some_vision(CPU, [3], [0], gap=1)
    features = drawn(3, 4)
    merged, taken = merge_embeddings(torch.zeros(4, 4).bfloat16(), features, vision, [features])
    assert merged.dtype == taken[0].dtype == torch.bfloat16
    merged.sum().backward()
    assert features.grad.dtype == torch.float32


@pytest.mark.parametrize("levels", [0, 2])
def test_opcheck(levels):
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    rows, features = drawn(len(vision.source), 4).detach(), drawn(7, 4).detach()
    deep = [drawn(7, 4).detach() for _ in range(levels)]
    torch.library.opcheck(
        torch.ops.mmpack.merge_embeddings.default, (rows, features, deep, *vision)
    )
    back = rows, [drawn(len(vision.rows), 4).detach() for _ in deep], *vision, len(rows), 7
    torch.library.opcheck(torch.ops.mmpack.unmerge_embeddings.default, back)


@pytest.mark.parametrize("levels", [0, 2])
def test_second_derivatives(levels):
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    inputs = [drawn(len(vision.source), 4), *(drawn(7, 4) for _ in range(1 + levels))]
    inputs = [x.detach().double().requires_grad_() for x in inputs]

    def merged(embeddings, features, *deep):
        out, made = merge_embeddings(embeddings, features, vision, deep)
        return out, *made

    assert torch.autograd.gradgradcheck(merged, inputs)
    for kept in range(len(inputs)):  # only one input has a gradient
        alone = [x if i == kept else x.detach() for i, x in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(merged, alone)


def test_one_tensor_twice_under_compile():
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    rows, features = drawn(len(vision.source), 4).detach(), drawn(7, 4).detach().requires_grad_()

    def step(x):
        merged, made = merge_embeddings(rows, x, vision, [x])
        return merged.sum() + made[0].square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(features), features)[0] for f in (compiled, step))
    assert torch.equal(found, wanted)


def test_compiles_in_one_piece():
    def step(embeddings, features, level, vision):
        merged, (taken,) = merge_embeddings(embeddings, features, vision, [level])
        return merged * 2, taken * 3

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for runs in ([0, 1, 0], [1, 0, 1, 0]):
        vision = some_vision(CPU, [3, 4], runs, gap=2)
        inputs = drawn(len(vision.source), 4), drawn(7, 4), drawn(7, 4)
        results = []
        for f in (step, compiled):
            out = f(*inputs, vision)
            results.append([*out, *torch.autograd.grad(out, inputs, [x.detach() for x in out])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 4), (3, 4), (3, 4)), r"embeddings has shape \[7, 4\], expected \[8, H\]"),
        (((1, 8, 4), (3, 4), (3, 4)), "without the batch dimension"),
        (((8, 4), (4, 4), (3, 4)), r"features has shape \[4, 4\], expected \[3, 4\]"),
        (((8, 4), (3, 4), (3, 5)), r"levels\[0\] has shape \[3, 5\]"),
    ],
)
def test_what_is_refused(shapes, message):
    vision = some_vision(CPU, [3], [0, 0], gap=1)
    embeddings, features, level = (torch.zeros(s) for s in shapes)
    with pytest.raises(mp.ArgumentError, match=message):
        merge_embeddings(embeddings, features, vision, [level])


def test_indices_out_of_range_are_refused():
    vision = some_vision(CPU, [3], [0], gap=1)
    vision = vision._replace(source=vision.source + 1)
    with pytest.raises(
        mp.ArgumentError, match=r"vision.source runs from 0 to 3, expected \[-1, 3\)"
    ):
        merge_embeddings(torch.zeros(4, 4), torch.zeros(3, 4), vision)
