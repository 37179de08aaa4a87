"""The merge's kernels: transformers' masked_scatter forward, numpy's sum in order backward, in any company."""

import pytest
import torch
from support import gathers
from support.gathers import merged_as_transformers_does, some_vision

from mmpack.ops.embeddings.merge import merge_embeddings

pytestmark = pytest.mark.kernel


def summed_in_order(values, index, num_rows):
    interpreted = values.device.type == "cpu"
    return gathers.summed_in_order(values, index, num_rows, interpreted)


def drawn(device, rows, width, dtype=torch.float32):
    return torch.randn(rows, width, device=device).to(dtype).requires_grad_()


def both(inputs, vision, deep, weights):
    """Outputs and gradients; memory is poisoned, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN
    try:
        merged, taken = merge_embeddings(*inputs, vision, deep)
        grads = torch.autograd.grad([merged, *taken], [*inputs, *deep], weights)
    finally:
        torch.use_deterministic_algorithms(False)
    return [merged, *taken], grads


@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 7, 36, 448])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(device, levels, width, dtype):
    vision = some_vision(device, [3, 4, 2], [0, 1, 0, 0, 1], gap=2, tail=5)
    inputs = [drawn(device, n, width, dtype) for n in (len(vision.source), 9)]
    deep = [drawn(device, 9, width, dtype) for _ in range(levels)]
    weights = [drawn(device, len(vision.source), width, dtype).detach()]
    weights += [drawn(device, len(vision.rows), width, dtype).detach() for _ in deep]
    outputs, grads = both(inputs, vision, deep, weights)
    expected, expected_taken = merged_as_transformers_does(*inputs, vision, deep)
    for a, b in zip(outputs, [expected, *expected_taken], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(grads[0], torch.where((vision.source < 0)[:, None], weights[0], 0))
    weights[0] = weights[0][vision.rows.long()]
    for grad, weight in zip(grads[1:], weights, strict=True):
        assert torch.equal(grad, summed_in_order(weight, vision.features, 9))


def test_company_changes_nothing(device):
    """A medium's gradient is the same bits whatever other media are packed with it."""
    features, weight = drawn(device, 12, 40), torch.randn(2, 5, 40, device=device) * 1e4
    grads = []
    for runs in ([1, 1], [0, 1, 2, 1, 0], [2, 1, 1, 0]):
        vision = some_vision(device, [3, 5, 4], runs, gap=1)
        embeddings = torch.zeros(len(vision.source), 40, device=device)
        upstream = torch.randn_like(embeddings)
        upstream[((vision.source >= 3) & (vision.source < 8)).nonzero()[:, 0]] = weight.flatten(
            0, 1
        )
        merged, _ = merge_embeddings(embeddings, features, vision)
        grads.append(torch.autograd.grad(merged, features, upstream)[0][3:8])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_nan_where_nobody_reads(device):
    vision = some_vision(device, [3, 2], [0, 0], gap=1)
    text = (vision.source < 0)[:, None]
    embeddings = torch.where(text, torch.ones(8, 4, device=device), torch.nan).requires_grad_()
    features = torch.full((5, 4), torch.nan, device=device)
    features[:3] = 2
    features.requires_grad_()
    merged, _ = merge_embeddings(embeddings, features, vision)
    assert torch.equal(merged, torch.where(text, 1.0, 2.0).expand(8, 4))
    weight = torch.where(text, torch.ones(8, 4, device=device), torch.nan)
    to_embeddings, to_features = torch.autograd.grad(merged, [embeddings, features], weight)
    assert torch.equal(to_embeddings, text * torch.ones(8, 4, device=device))
    assert to_features[:3].isnan().all()
    assert torch.equal(to_features[3:], torch.zeros(2, 4, device=device))


@pytest.mark.parametrize("frozen", ["embeddings", "features", "levels"])
def test_what_is_frozen_costs_nothing(device, frozen):
    vision = some_vision(device, [3, 4], [0, 1, 0], gap=1)
    parts = {
        "embeddings": drawn(device, len(vision.source), 8),
        "features": drawn(device, 7, 8),
        "levels": drawn(device, 7, 8),
    }
    parts[frozen].requires_grad_(False)
    merged, (taken,) = merge_embeddings(
        parts["embeddings"], parts["features"], vision, [parts["levels"]]
    )
    (merged.sum() + taken.sum()).backward()
    counts = torch.bincount(vision.features, minlength=7).float()[:, None].expand(7, 8)
    for name, x in parts.items():
        assert (x.grad is None) == (name == frozen)
        if name != "embeddings" and x.grad is not None:
            assert torch.equal(x.grad, counts)


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (5, 0)])
def test_nothing_to_merge(device, rows, width):
    vision = some_vision(device, [], [], gap=0, tail=rows)
    inputs = drawn(device, rows, width), drawn(device, 0, width)
    merged, _ = merge_embeddings(*inputs, vision)
    grads = torch.autograd.grad(merged, inputs, torch.ones_like(merged))
    assert [g.shape for g in (merged, *grads)] == [(rows, width), (rows, width), (0, width)]


def test_text_alone(device):
    vision = some_vision(device, [], [], gap=0, tail=5)
    embeddings = drawn(device, 5, 4)
    empty = torch.zeros(0, 4, device=device)
    merged, (taken,) = merge_embeddings(embeddings, empty, vision, [empty])
    assert torch.equal(merged, embeddings) and taken.shape == (0, 4)
    merged.sum().backward()
    assert torch.equal(embeddings.grad, torch.ones(5, 4, device=device))


@pytest.mark.parametrize("levels", [0, 2])
def test_opcheck(device, levels):
    vision = some_vision(device, [3, 4], [0, 1, 0], gap=1)
    inputs = drawn(device, len(vision.source), 4).detach(), drawn(device, 7, 4).detach()
    deep = [drawn(device, 7, 4).detach() for _ in range(levels)]
    torch.library.opcheck(torch.ops.mmpack.merge_embeddings.default, (*inputs, deep, *vision))


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    vision = some_vision(device, [30, 40], [0, 1, 0, 0], gap=20)
    inputs = [drawn(device, n, 896, torch.bfloat16) for n in (len(vision.source), 70)]
    deep = [drawn(device, 70, 896, torch.bfloat16) for _ in range(3)]
    weights = [torch.randn(len(vision.source), 896, device=device).bfloat16()]
    weights += [torch.randn(len(vision.rows), 896, device=device).bfloat16() for _ in deep]

    def step():
        merged, taken = merge_embeddings(*inputs, vision, deep)
        return merged, *taken, *torch.autograd.grad([merged, *taken], [*inputs, *deep], weights)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (*inputs, *deep, *weights):
            x.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_compiled_by_inductor(device):
    vision = some_vision(device, [30, 40], [0, 1, 0, 0], gap=20)

    def step(embeddings, features, level):
        merged, (taken,) = merge_embeddings(embeddings, features, vision, [level])
        return merged * 2, taken * 3

    inputs = [drawn(device, n, 64) for n in (len(vision.source), 70, 70)]
    results = []
    for f in (step, torch.compile(step, fullgraph=True)):
        out = f(*inputs)
        results.append([*out, *torch.autograd.grad(out, inputs, [x.detach() for x in out])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(device):
    vision = some_vision(device, [30, 40], [0, 1, 0, 0], gap=20)
    inputs = [drawn(device, n, 64) for n in (len(vision.source), 70)]
    weight = torch.randn(len(vision.source), 64, device=device)
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            merged, _ = merge_embeddings(*inputs, vision)
            torch.autograd.grad(merged, inputs, weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")
