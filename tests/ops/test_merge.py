"""merge_embeddings and project_and_merge: transformers' masked_scatter, a linear layer, by autograd in float64."""

import os

import pytest
import torch
from support import gathers
from support.gathers import merged_as_transformers_does, some_vision
from support.kernels import running
from torch.nn.functional import linear

import mmpack as mp
from mmpack.contracts import TOLERANCES, gradient_fp32_bound
from mmpack.ops.embeddings.merge import merge_embeddings

CPU = torch.device("cpu")
SIZES, RUNS = [3, 40, 2, 5], [0, 1, 0, 0, 2, 1]  # the last medium is nowhere
TOTAL = sum(SIZES)
FULL, HALVES = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
PATHS = {"torch": (), "triton": pytest.mark.kernel}
each_path = pytest.mark.parametrize("path", [pytest.param(p, marks=m) for p, m in PATHS.items()])


@pytest.fixture
def device(path, monkeypatch) -> torch.device:
    return running(path, monkeypatch)


def drawn(device, rows, width, dtype=torch.float32):
    return torch.randn(rows, width, device=device).to(dtype).requires_grad_()


def summed_in_order(values, index, num_rows, path):
    interpreted = path == "triton" and values.device.type == "cpu"
    return gathers.summed_in_order(values, index, num_rows, interpreted)


@pytest.mark.few(8)
@each_path
@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 7, 36, 448])
@pytest.mark.parametrize("dtype", [*FULL, torch.bfloat16])
def test_merging(path, device, levels, width, dtype):
    vision = some_vision(device, [3, 4, 2], [0, 1, 0, 0, 1], gap=2, tail=5)
    inputs = [drawn(device, n, width, dtype) for n in (len(vision.source), 9, *[9] * levels)]
    merged, taken = merge_embeddings(*inputs[:2], vision, inputs[2:])
    expected, expected_taken = merged_as_transformers_does(*inputs[:2], vision, inputs[2:])
    assert torch.equal(merged, expected) and len(taken) == levels
    assert all(map(torch.equal, taken, expected_taken))
    weights = [torch.randn_like(x) for x in (merged, *taken)]
    grads = torch.autograd.grad([merged, *taken], inputs, weights)
    assert torch.equal(grads[0], torch.where((vision.source < 0)[:, None], weights[0], 0))
    weights[0] = weights[0][vision.rows.long()]
    for grad, weight in zip(grads[1:], weights, strict=True):
        assert torch.equal(grad, summed_in_order(weight, vision.features, 9, path))


def layer(device, rows, depth, width, dtype=torch.float32, bias=True):
    """Random; values of a linear layer's size."""
    parts = torch.randn(rows, depth), torch.randn(width, depth) / depth**0.5, torch.randn(width)
    parts = [x.to(device, dtype).requires_grad_() for x in parts]
    return mp.ops.Projection(*parts[: 3 if bias else 2])


def tensors(layers):
    return [x for p in layers for x in p if x is not None]


def by_torch(embeddings, projector, vision, levels=()):
    """The layers as transformers runs them, and its merge."""
    features, *deep = (linear(*p).to(embeddings.dtype) for p in (projector, *levels))
    return merged_as_transformers_does(embeddings, features, vision, deep)


def outputs_and_gradients(run, embeddings, layers, vision, weights):
    merged, taken = run(embeddings, layers[0], vision, layers[1:])
    out = [merged, *taken]
    grads = torch.autograd.grad(out, [embeddings, *tensors(layers)], weights)
    return [*(x.detach() for x in out), *grads]


def check_projection(device, dtype, depth, width, levels, bias, sizes=SIZES, runs=RUNS, out=None):
    total, vision = sum(sizes), some_vision(device, sizes, runs, gap=2, tail=5)
    embeddings = drawn(device, len(vision.source), width, out or dtype)
    layers = [layer(device, total, depth + 8 * i, width, dtype, bias) for i in range(1 + levels)]
    weights = [torch.randn_like(embeddings)]
    weights += [
        torch.randn(len(vision.rows), width, device=device).to(embeddings) for _ in layers[1:]
    ]
    found = outputs_and_gradients(mp.ops.project_and_merge, embeddings, layers, vision, weights)
    wide = [
        mp.ops.Projection(*(None if x is None else x.detach().double().requires_grad_() for x in p))
        for p in layers
    ]
    exact = outputs_and_gradients(
        by_torch, embeddings.detach().double().requires_grad_(), wide, vision,
        [w.double() for w in weights],
    )  # fmt: skip
    interpreted = device.type == "cpu" and os.environ["MMPACK_BACKEND"] == "triton"
    torchs = found
    if not interpreted and dtype in HALVES:
        torchs = outputs_and_gradients(by_torch, embeddings, layers, vision, weights)
    errors = []
    for ours, theirs, expected in zip(found, torchs, exact, strict=True):
        assert ours.shape == expected.shape and ours.isfinite().all()
        norm = expected.norm().clamp(min=1e-30)
        errors.append([float((x.double() - expected).norm() / norm) for x in (ours, theirs)])
        if dtype in HALVES:
            assert errors[-1][0] <= (2 if interpreted else 1) * TOLERANCES["gradient_bf16"].value
        else:
            bound = gradient_fp32_bound(expected.abs().max()) if dtype == torch.float32 else 1e-12
            assert (ours.double() - expected).abs().max() <= bound
    # Of all together: a bias alone has too few numbers for a share of an error.
    all_ours, all_theirs = torch.tensor(errors).norm(dim=0)
    assert dtype in FULL or all_ours <= TOLERANCES["gradient_vs_torch"].value * all_theirs, errors
    text = vision.source < 0
    assert found[0].dtype == embeddings.dtype and torch.equal(found[0][text], embeddings[text])
    assert torch.equal(found[1 + levels], torch.where(text[:, None], weights[0], 0))
    if sizes is SIZES:  # of the medium that is nowhere
        assert not any(g[total - 5 :].any() for g in found[2 + levels :: 2 + bias])


def projections():
    for path, dtypes in (("torch", (*FULL, torch.bfloat16)), ("triton", HALVES)):
        for dtype in dtypes:
            for depth, width, levels, bias in (
                (40, 72, 0, True),
                (33, 129, 3, False),
                (64, 64, 1, True),
            ):
                yield pytest.param(path, dtype, depth, width, levels, bias, marks=PATHS[path])
    yield pytest.param("triton", torch.bfloat16, 5120, 3584, 3, True, marks=[pytest.mark.gpu])


@pytest.mark.parametrize(("path", "dtype", "depth", "width", "levels", "bias"), list(projections()))
def test_projecting(device, dtype, depth, width, levels, bias):
    real = ([1024, 529, 77, 2000], [0, 1, 0, 2, 3, 1]) if depth > 5000 else ()
    check_projection(device, dtype, depth, width, levels, bias, *real)


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
@pytest.mark.parametrize("out", [torch.float32, None])
def test_projecting_in_chunks_and_written_in_float32(device, out, monkeypatch):
    monkeypatch.setattr("mmpack.ops.projection.triton.GATHERED_ROWS", 17)
    check_projection(device, torch.bfloat16, 40, 72, 1, True, out=out)


def test_gradients_by_differences():
    vision = some_vision(CPU, [2, 1], [0, 1, 0], gap=1)
    text = drawn(CPU, len(vision.source), 3, torch.float64)
    seen, deep = drawn(CPU, 3, 3, torch.float64), drawn(CPU, 3, 3, torch.float64)

    def merged(embeddings, features, deep):
        out, made = merge_embeddings(embeddings, features, vision, [deep])
        return out, *made

    assert torch.autograd.gradcheck(merged, (text, seen, deep))
    for kept in (None, 0, 1, 2):  # all have a gradient, or only one
        inputs = [x if kept in (None, i) else x.detach() for i, x in enumerate((text, seen, deep))]
        assert torch.autograd.gradgradcheck(merged, inputs)
    parts = [layer(CPU, 3, 2, 3, torch.float64) for _ in range(2)]

    def run(embeddings, *flat):
        one, other = mp.ops.Projection(*flat[:3]), mp.ops.Projection(*flat[3:])
        out, made = mp.ops.project_and_merge(embeddings, one, vision, [other])
        return out, *made

    assert torch.autograd.gradcheck(run, (text, *tensors(parts)))


@each_path
@pytest.mark.parametrize("projected", [False, True])
def test_company_changes_nothing(path, device, projected):
    """A medium's rows and their gradients are the same bits whatever other media are packed with it."""
    dtype = torch.bfloat16 if projected else torch.float32
    inputs, weight, bias = layer(device, 37, 40, 72, dtype)
    up_rows = torch.linspace(-1, 1, 37 * (72 if projected else 40), device=device) * 1e4
    made = []
    for sizes, runs in (([37], [0, 0]), ([70, 37], [0, 1, 0, 1]), ([1, 37, 9], [1, 0, 2, 1])):
        at = sizes.index(37)
        before, after = sum(sizes[:at]), sum(sizes[at + 1 :])
        around = [torch.randn(n, 40, device=device).to(dtype) for n in (before, after)]
        whole = torch.cat([around[0], inputs.detach(), around[1]]).requires_grad_()
        vision = some_vision(device, sizes, runs, gap=1)
        text = torch.zeros(len(vision.source), 72 if projected else 40, dtype=dtype, device=device)
        if projected:
            merged, _ = mp.ops.project_and_merge(
                text, mp.ops.Projection(whole, weight, bias), vision
            )
        else:
            merged, _ = merge_embeddings(text, whole, vision)
        rows = (vision.source >= before) & (vision.source < before + 37)
        up = torch.zeros_like(merged)
        up[rows] = up_rows.view(37, -1).repeat(2, 1).to(dtype)
        (grad,) = torch.autograd.grad(merged, whole, up)
        made.append((merged[rows].detach(), grad[before : before + 37]))
    for other in made[1:]:
        assert all(map(torch.equal, made[0], other))


def of_dtype(path):
    """What the projection's kernels take."""
    return torch.bfloat16 if path == "triton" else torch.float32


@each_path
def test_nan_where_nobody_reads(path, device):
    """Embeddings of vision rows, features and inputs of a medium that is nowhere, and their gradients."""
    vision = some_vision(device, [3, 2], [0, 0], gap=1)
    text = (vision.source < 0)[:, None]
    embeddings = torch.where(text, torch.ones(8, 16, device=device), torch.nan).requires_grad_()
    features = torch.full((5, 16), torch.nan, device=device)
    features[:3] = 2
    merged, _ = merge_embeddings(embeddings, features.requires_grad_(), vision)
    assert torch.equal(merged, torch.where(text, 1.0, 2.0).expand(8, 16))
    up = torch.where(text, torch.ones(8, 16, device=device), torch.nan)
    to_embeddings, to_features = torch.autograd.grad(merged, [embeddings, features], up)
    assert torch.equal(to_embeddings, text * torch.ones(8, 16, device=device))
    assert to_features[:3].isnan().all() and not to_features[3:].any()
    own = layer(device, 5, 8, 16, of_dtype(path))
    with torch.no_grad():
        own.inputs[3:] = torch.nan
    merged, _ = mp.ops.project_and_merge(embeddings.to(of_dtype(path)), own, vision)
    assert merged.isfinite().all()
    merged.backward(torch.where(text, torch.nan, 1.0).expand(8, 16).to(merged.dtype))
    assert own.inputs.grad.isfinite().all() and not own.inputs.grad[3:].any()


@each_path
@pytest.mark.parametrize("frozen", ["embeddings", "features", "level", "inputs", "weight", "bias"])
def test_what_is_frozen_has_no_gradient(path, device, frozen):
    vision = some_vision(device, SIZES, RUNS, gap=1)
    parts = layer(device, TOTAL, 8, 16, of_dtype(path))._asdict()
    parts |= {name: drawn(device, TOTAL, 16) for name in ("features", "level")}
    parts["embeddings"] = drawn(device, len(vision.source), 16)
    parts[frozen].requires_grad_(False)
    text = parts["embeddings"]
    merged, (taken,) = merge_embeddings(text, parts["features"], vision, [parts["level"]])
    own = mp.ops.Projection(*(parts[name] for name in mp.ops.Projection._fields))
    projected, _ = mp.ops.project_and_merge(text.to(of_dtype(path)), own, vision)
    (merged.sum() + taken.sum() + projected.float().sum()).backward()
    counts = torch.bincount(vision.features, minlength=TOTAL).float()[:, None].expand(TOTAL, 16)
    for name, x in parts.items():
        assert (x.grad is None) == (name == frozen)
        if name in ("features", "level") and name != frozen:
            assert torch.equal(x.grad, counts)


@each_path
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (5, 0), (5, 8)])
def test_text_alone(path, device, rows, width):
    vision = some_vision(device, [], [], gap=0, tail=rows)
    text, none = drawn(device, rows, width), drawn(device, 0, width)
    merged, (taken,) = merge_embeddings(text, none, vision, [none])
    grads = torch.autograd.grad(merged, (text, none), torch.ones_like(merged))
    assert torch.equal(merged, text) and taken.shape == grads[1].shape == (0, width)
    assert torch.equal(grads[0], torch.ones_like(text))
    own, level = (layer(device, 0, 6, width, of_dtype(path)) for _ in "ab")
    text = text.detach().to(own.inputs.dtype).requires_grad_()
    merged, taken = mp.ops.project_and_merge(text, own, vision, [level])
    assert torch.equal(merged, text) and taken[0].shape == (0, width)
    merged.sum().backward()
    assert torch.equal(text.grad, torch.ones_like(text)) and not own.weight.grad.any()


def test_dtypes_and_autocast_are_those_of_transformers():
    """Features are written in the dtype of the embeddings; autocast casts as a linear layer."""
    vision = some_vision(CPU, SIZES, RUNS, gap=1)
    features = drawn(CPU, TOTAL, 4)
    merged, taken = merge_embeddings(
        torch.zeros(len(vision.source), 4).bfloat16(), features, vision, [features]
    )
    assert merged.dtype == taken[0].dtype == torch.bfloat16
    merged.sum().backward()
    assert features.grad.dtype == torch.float32
    embeddings = torch.zeros(len(vision.source), 4)
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True)):
        own = layer(CPU, TOTAL, 6, 4, dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            merged, _ = mp.ops.project_and_merge(embeddings, own, vision)
            expected, _ = by_torch(embeddings, own, vision)
        assert (merged - expected).abs().max() <= 2**-8 * expected.abs().max()
        assert merged.dtype == torch.float32 and torch.equal(merged, merged.bfloat16().float())
        merged.sum().backward()
        assert own.weight.grad.dtype == dtype


def test_one_tensor_twice_under_compile():
    vision = some_vision(CPU, [3, 4], [0, 1, 0], gap=1)
    rows, features = drawn(CPU, len(vision.source), 4).detach(), drawn(CPU, 7, 4)

    def step(x):
        merged, made = merge_embeddings(rows, x, vision, [x])
        return merged.sum() + made[0].square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(features), features)[0] for f in (compiled, step))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 4), (3, 4), (3, 4)), r"embeddings has shape \[7, 4\], expected \[8, H\]"),
        (((1, 8, 4), (3, 4), (3, 4)), "without the batch dimension"),
        (((8, 4), (4, 4), (3, 4)), r"features has shape \[4, 4\], expected \[3, 4\]"),
        (((8, 4), (3, 4), (3, 5)), r"levels\[0\] has shape \[3, 5\]"),
    ],
)
def test_what_merging_refuses(shapes, message):
    vision = some_vision(CPU, [3], [0, 0], gap=1)
    embeddings, features, level = (torch.zeros(s) for s in shapes)
    with pytest.raises(mp.ArgumentError, match=message):
        merge_embeddings(embeddings, features, vision, [level])


GOOD = {"embeddings": (8, 4), "inputs": (3, 6), "weight": (4, 6), "bias": (4,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"embeddings": (7, 4)}, r"embeddings has shape \[7, 4\], expected \[8, H\]"),
        ({"inputs": (4, 6)}, r"LAYER.inputs has shape \[4, 6\], expected \[3, K\]"),
        ({"weight": (6, 4)}, r"LAYER.weight has shape \[6, 4\], expected \[4, 6\]"),
        ({"bias": (1,)}, r"LAYER.bias has shape \[1\], expected \[4\]"),
        ({"inputs": [[1.0] * 6] * 3}, "LAYER.inputs is of type list"),
        ({"weight": torch.zeros(4, 6).bfloat16()}, "torch.bfloat16, torch.float32"),
        ({"weight": torch.zeros(4, 6, device="meta")}, "LAYER.weight on meta"),
        ({"embeddings": torch.zeros(8, 4).long()}, "embeddings is torch.int64"),
    ],
)
@pytest.mark.parametrize("place", ["projector", r"levels\[0\]"])
def test_what_projecting_refuses(changed, message, place):
    vision = some_vision(CPU, [3], [0, 0], gap=1)
    made = {n: torch.zeros(s) if isinstance(s, tuple) else s for n, s in (GOOD | changed).items()}
    embeddings = made.pop("embeddings")
    layers = [mp.ops.Projection(*(torch.zeros(GOOD[n]) for n in made)), mp.ops.Projection(**made)]
    layers = layers[::-1] if place == "projector" else layers
    with pytest.raises(mp.ArgumentError, match=message.replace("LAYER", place)):
        mp.ops.project_and_merge(embeddings, layers[0], vision, layers[1:])


def test_other_things_are_refused():
    vision, own = some_vision(CPU, [3], [0], gap=1), layer(CPU, 3, 6, 4)
    text, moved = torch.zeros(4, 4), vision._replace(source=vision.source + 1)
    for arguments, message in (
        ((tuple(own), vision), "projector is of type tuple. Fix: pass mp.ops.Projection"),
        ((own, list(vision)), r"expected VisionRows. Fix: pass batch.vision_rows"),
        ((own, vision, None), r"levels is None, expected a list.* Fix: pass \[\]"),
        ((own, moved), r"vision.source runs from 0 to 3, expected \[-1, 3"),
    ):
        with pytest.raises(mp.ArgumentError, match=message):
            mp.ops.project_and_merge(text, *arguments)
    with pytest.raises(mp.ArgumentError, match=r"vision.source runs from 0 to 3, expected \[-1, 3"):
        merge_embeddings(text, torch.zeros(3, 4), moved)


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
def test_other_dtypes_are_refused_by_name(device):
    with pytest.raises(mp.BackendError, match=r"its kernels take bf16 and fp16, not torch.float32"):
        check_projection(device, torch.float32, 40, 72, 0, True)
