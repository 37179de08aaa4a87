"""The fused product's kernels: a linear layer and transformers' masked_scatter in float64, in any company."""

import pytest
import torch
from support.gathers import merged_as_transformers_does, some_vision
from torch.nn.functional import linear

import mmpack as mp
from mmpack.contracts import TOLERANCES

pytestmark = pytest.mark.kernel
SIZES, RUNS = [3, 40, 2, 5], [0, 1, 0, 0, 2, 1]  # the last medium is nowhere
TOTAL = sum(SIZES)
HALVES = [torch.bfloat16, torch.float16]


def layer(device, rows, depth, width, dtype=torch.bfloat16, bias=True):
    parts = torch.randn(rows, depth), torch.randn(width, depth) / depth**0.5, torch.randn(width)
    parts = [x.to(device, dtype).requires_grad_() for x in parts]
    return mp.Projection(*parts[: 3 if bias else 2])


def tensors(layers):
    return [x for p in layers for x in p if x is not None]


def by_torch(embeddings, projector, vision, levels=()):
    features, *deep = (linear(*p).to(embeddings.dtype) for p in (projector, *levels))
    return merged_as_transformers_does(embeddings, features, vision, deep)


def outputs_and_gradients(run, embeddings, layers, vision, weights):
    """Memory is poisoned, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN
    try:
        merged, taken = run(embeddings, layers[0], vision, layers[1:])
        out = [merged, *taken]
        grads = torch.autograd.grad(out, [embeddings, *tensors(layers)], weights)
    finally:
        torch.use_deterministic_algorithms(False)
    return [*(x.detach() for x in out), *grads]


def off(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check(device, dtype, depth, width, levels, bias, sizes=SIZES, runs=RUNS, out_dtype=None):
    total = sum(sizes)
    vision = some_vision(device, sizes, runs, gap=2, tail=5)
    embeddings = torch.randn(len(vision.source), width, device=device).to(out_dtype or dtype)
    embeddings.requires_grad_()
    layers = [layer(device, total, depth + 8 * i, width, dtype, bias) for i in range(1 + levels)]
    weights = [torch.randn_like(embeddings)]
    weights += [
        torch.randn(len(vision.rows), width, device=device).to(embeddings) for _ in layers[1:]
    ]
    found = outputs_and_gradients(mp.project_and_merge, embeddings, layers, vision, weights)
    wide = embeddings.detach().double().requires_grad_()
    wide_layers = [
        mp.Projection(*(None if x is None else x.detach().double().requires_grad_() for x in p))
        for p in layers
    ]
    exact = outputs_and_gradients(
        by_torch, wide, wide_layers, vision, [w.double() for w in weights]
    )
    torchs = found
    if device.type == "cuda":  # the interpreter cuts where GPUs round
        torchs = outputs_and_gradients(by_torch, embeddings, layers, vision, weights)
    for ours, theirs, expected in zip(found, torchs, exact, strict=True):
        assert ours.shape == expected.shape and ours.isfinite().all()
        errors = off(ours, expected), off(theirs, expected)
        interpreted = 2 if device.type == "cpu" else 1
        assert errors[0] <= interpreted * TOLERANCES["gradient_bf16"].value, errors
        assert errors[0] <= TOLERANCES["gradient_vs_torch"].value * errors[1] + 1e-7, errors
    text = vision.source < 0
    assert torch.equal(found[0][text], embeddings[text])
    assert torch.equal(found[1 + levels], torch.where(text[:, None], weights[0], 0))


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize(("depth", "width"), [(40, 72), (33, 129), (64, 64)])
@pytest.mark.parametrize("dtype", HALVES)
def test_values_and_gradients(device, dtype, depth, width, levels):
    check(device, dtype, depth, width, levels, bias=levels == 0)


def test_written_in_float32(device):
    check(device, torch.bfloat16, 40, 72, 1, bias=True, out_dtype=torch.float32)


def test_gradients_are_gathered_in_chunks(device, monkeypatch):
    monkeypatch.setattr("mmpack.ops.projection.triton.GATHERED_ROWS", 17)
    check(device, torch.bfloat16, 40, 72, 1, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [0, 3])
def test_real_widths(device, levels):
    sizes = [1024, 529, 77, 2000]
    check(device, torch.bfloat16, 5120, 3584, levels, True, sizes, [0, 1, 0, 2, 3, 1])


def test_company_changes_nothing(device):
    """Rows and their gradients are the same bits whatever else is packed with a medium."""
    inputs, weight, bias = layer(device, 37, 40, 72)
    made = []
    for sizes in ([37], [70, 37], [1, 37, 9]):
        at = sizes.index(37)
        before, after = sum(sizes[:at]), sum(sizes[at + 1 :])
        around = [torch.randn(n, 40, device=device).bfloat16() for n in (before, after)]
        whole = torch.cat([around[0], inputs.detach(), around[1]]).requires_grad_()
        vision = some_vision(device, sizes, list(range(len(sizes))), gap=1)
        embeddings = torch.zeros(len(vision.source), 72, dtype=torch.bfloat16, device=device)
        merged, _ = mp.project_and_merge(embeddings, mp.Projection(whole, weight, bias), vision)
        rows = (vision.source >= before) & (vision.source < before + 37)
        up = torch.zeros_like(merged)
        up[rows] = torch.linspace(-1, 1, 37 * 72, device=device).view(37, 72).bfloat16()
        (grad,) = torch.autograd.grad(merged, whole, up)
        made.append((merged[rows].detach(), grad[before : before + 37]))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.gpu
def test_the_same_bits_twice(device):
    sizes, runs = [300, 411, 64], [0, 1, 0, 2, 1, 1]
    vision = some_vision(device, sizes, runs, gap=5)
    embeddings = torch.randn(len(vision.source), 896, device=device).bfloat16().requires_grad_()
    layers = [layer(device, sum(sizes), 1280, 896) for _ in range(2)]
    weights = [
        torch.randn(n, 896, device=device).bfloat16() for n in (len(embeddings), len(vision.rows))
    ]
    first, second = (
        outputs_and_gradients(mp.project_and_merge, embeddings, layers, vision, weights)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_text_alone(device):
    vision = some_vision(device, [], [], gap=0, tail=5)
    embeddings = torch.randn(5, 8, device=device).bfloat16().requires_grad_()
    own, level = layer(device, 0, 6, 8), layer(device, 0, 6, 8)
    merged, taken = mp.project_and_merge(embeddings, own, vision, [level])
    assert torch.equal(merged, embeddings) and taken[0].shape == (0, 8)
    merged.sum().backward()
    assert torch.equal(embeddings.grad, torch.ones_like(embeddings))
    assert torch.equal(own.weight.grad, torch.zeros_like(own.weight))


def test_nan_where_nobody_reads(device):
    vision = some_vision(device, [3, 2], [0, 0], gap=1)
    text = (vision.source < 0)[:, None]
    embeddings = torch.where(text, torch.ones(8, 16, device=device), torch.nan).bfloat16()
    own = layer(device, 5, 8, 16)
    with torch.no_grad():
        own.inputs[3:] = torch.nan
    merged, _ = mp.project_and_merge(embeddings, own, vision)
    assert merged.isfinite().all()
    merged.backward(torch.where(text, torch.nan, 1.0).expand(8, 16).bfloat16())
    assert own.inputs.grad.isfinite().all() and not own.inputs.grad[3:].any()


@pytest.mark.parametrize("frozen", ["embeddings", "inputs", "weight", "bias"])
def test_what_is_frozen_has_no_gradient(device, frozen):
    vision = some_vision(device, SIZES, RUNS, gap=1)
    parts = layer(device, TOTAL, 8, 16)._asdict()
    parts["embeddings"] = torch.zeros(len(vision.source), 16, device=device).bfloat16()
    parts["embeddings"].requires_grad_()
    parts[frozen].requires_grad_(False)
    own = mp.Projection(*(parts[name] for name in mp.Projection._fields))
    mp.project_and_merge(parts["embeddings"], own, vision)[0].sum().backward()
    for name, x in parts.items():
        assert (x.grad is None) == (name == frozen)


def test_other_dtypes_are_refused_by_name(device):
    vision = some_vision(device, [3], [0], gap=1)
    own = layer(device, 3, 6, 4, torch.float32)
    with pytest.raises(mp.BackendError, match=r"its kernels take bf16 and fp16, not torch.float32"):
        mp.project_and_merge(torch.zeros(4, 4, device=device), own, vision)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(device):
    vision = some_vision(device, [30, 40], [0, 1, 0, 0], gap=20)
    embeddings = torch.randn(len(vision.source), 64, device=device).bfloat16().requires_grad_()
    layers = [layer(device, 70, 96, 64) for _ in range(2)]
    weights = [
        torch.randn(n, 64, device=device).bfloat16() for n in (len(embeddings), len(vision.rows))
    ]
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            merged, taken = mp.project_and_merge(embeddings, layers[0], vision, layers[1:])
            torch.autograd.grad([merged, *taken], [embeddings, *tensors(layers)], weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiled_by_inductor(device):
    vision = some_vision(device, [30, 40], [0, 1, 0, 0], gap=20)

    def step(embeddings, own, level):
        merged, (taken,) = mp.project_and_merge(embeddings, own, vision, [level])
        return merged * 2, taken * 3

    embeddings = torch.randn(len(vision.source), 64, device=device).bfloat16().requires_grad_()
    layers = [layer(device, 70, 96, 64) for _ in range(2)]
    results = []
    for f in (step, torch.compile(step, fullgraph=True)):
        out = f(embeddings, *layers)
        leaves = [embeddings, *tensors(layers)]
        results.append([*out, *torch.autograd.grad(out, leaves, [x.detach() for x in out])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
